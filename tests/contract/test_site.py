"""The documentation builds as a site without a warning and without a network, and its links lead somewhere."""

import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import hf_hotspa
import hf_hotspa.callbacks
import hf_hotspa.trainer
from tests.contract.layers import ROOT

# mkdocs in a process that cannot open a connection
BUILD = """
import socket, sys
def refused(*args, **kwargs):
    raise SystemExit("the build asked for the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""


class Page(HTMLParser):
    """Links, anchors and resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.resources.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.resources.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed: make install brings it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 15
    return found


def test_links_lead_somewhere(site: Path) -> None:
    found, wrong = pages(site), []
    for path, page in found.items():
        if path.name == "404.html":  # written for the root of a server
            continue
        for link in [*page.links, *page.resources]:
            target, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", target):
                continue
            place = (path.parent / target).resolve() if target else path
            place = place / "index.html" if place.is_dir() else place
            known = place in found and (not anchor or anchor in found[place].ids or anchor == "__skip")
            if not (known or (place.exists() and place not in found)):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert wrong == []


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    away = {r for page in pages(site).values() for r in page.resources if re.match(r"(https?:)?//", r)}
    assert away == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?https?:", styles)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split()[0] for line in zlib.decompress(data).decode().splitlines()}
    homes = {**hf_hotspa._HOMES, **hf_hotspa.trainer._HOMES, **hf_hotspa.callbacks._HOMES}
    assert {f"{home}.{name}" for name, home in homes.items()} <= documented
    text = (site / "api" / "engine.html").read_text()
    assert "forward_backward" in text
    assert "Parameters:" in text or "<th>Name</th>" in text or "Parameters" in text


def test_the_flags_and_the_picture_are_there(site: Path) -> None:
    text = (site / "flags.html").read_text()
    assert "hotspa_strategies" in text
    assert "<table>" in text
    assert (site / "img" / "mini-batch.svg").exists()
    assert not list(site.rglob("*.py"))
