"""The page in a real browser, where one is installed: no console message, nothing that sticks out, in every dress."""

import shutil
import subprocess

import pytest

from hf_hotspa.reporting.page import report_page, save_page
from hf_hotspa.reporting.run_log import read_run_log
from tests.run_logs import write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

# Runs in the page, after it is drawn, and leaves what it found where the test reads it.
PROBE = """<script>addEventListener("load", function () {
  var dark = matchMedia("(prefers-color-scheme: dark)").matches;
  var wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  var charts = document.querySelectorAll("svg"), empty = 0;
  charts.forEach(function (c) { if (c.getBoundingClientRect().width < 200) empty++; });
  var column = document.querySelector("[data-tip]"), box = column.getBoundingClientRect();
  column.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.x + 1, clientY: box.y + 1}));
  var tip = document.getElementById("tip");
  document.title = ["PROBE", dark, wide, charts.length, empty, !tip.hidden && tip.textContent.length > 3,
    getComputedStyle(document.body).backgroundColor].join("|");
});</script>"""


@pytest.mark.parametrize("width", [500, 1300])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(tmp_path, width, dark):
    page = report_page(read_run_log(write_run(tmp_path, steps=40)))
    path = save_page(tmp_path / "page.html", page.replace("</body>", PROBE + "</body>"))
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    background = "rgb(20, 23, 27)" if dark else "rgb(246, 247, 249)"
    assert title.split("|") == ["PROBE", str(dark).lower(), "false", "8", "0", "true", background]
