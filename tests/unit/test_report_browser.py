"""The page in a real browser, where one is installed: no console message, nothing that sticks out, in every dress."""

import shutil
import subprocess

import pytest

from hf_hotspa.reporting.bench_result import bench_page, compared_page
from hf_hotspa.reporting.page import report_page
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.whole_file import write_whole
from tests.run_logs import write_run
from tests.unit.test_bench import file_of, result_of

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")

pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")

# Runs in the page, after it is drawn, and leaves what it found where the test reads it.
PROBE = """<script>addEventListener("load", function () {
  var dark = matchMedia("(prefers-color-scheme: dark)").matches;
  var wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  var charts = document.querySelectorAll("svg"), empty = 0;
  charts.forEach(function (c) { if (c.getBoundingClientRect().width < 200) empty++; });
  var panels = document.querySelectorAll("figure.panel"), blank = [];
  panels.forEach(function (p) {
    var marks = p.querySelectorAll("svg rect:not(.hover), svg polyline, svg circle, tbody tr, dl.facts div").length;
    if (!(p.dataset.points > 0) || !marks || p.querySelector(".empty")) blank.push(p.id);
  });
  var off = [];
  charts.forEach(function (c) {
    var whole = c.getBoundingClientRect(), before = [];
    c.querySelectorAll("text").forEach(function (t) {
      var b = t.getBoundingClientRect(), high = b.height * 0.2;
      var out = b.left < whole.left || b.right > whole.right || b.top + high < whole.top || b.bottom - high > whole.bottom;
      var over = before.some(function (a) {
        return b.left < a.right && a.left < b.right && b.top + high < a.bottom - high && a.top + high < b.bottom - high;
      });
      if (out || over) off.push(t.textContent);
      before.push(b);
    });
  });
  var column = document.querySelector("[data-tip]"), box = column.getBoundingClientRect();
  column.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.x + 1, clientY: box.y + 1}));
  var tip = document.getElementById("tip");
  document.title = ["PROBE", dark, wide, charts.length, empty, !tip.hidden && tip.textContent.length > 3,
    panels.length, blank.join(" "), off.join(" "), getComputedStyle(document.body).backgroundColor].join("|");
});</script>"""


def seen(folder, page, width=1300, dark=False):
    """What the probe finds in a page."""
    path = write_whole(folder / "page.html", page.replace("</body>", PROBE + "</body>"))
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout.partition("<title>")[2].partition("</title>")[0].split("|")


@needs_browser
@pytest.mark.parametrize("width", [500, 1300])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(tmp_path, width, dark):
    page = report_page(read_run_log(write_run(tmp_path, steps=40)))
    background = "rgb(20, 23, 27)" if dark else "rgb(246, 247, 249)"
    assert seen(tmp_path, page, width, dark) == [
        "PROBE", str(dark).lower(), "false", "11", "0", "true", "15", "", "", background,
    ]  # fmt: skip


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_pages_of_bench_in_a_browser(tmp_path, width):
    result = result_of(file_of("chat"), file_of("commoncrawl"), file_of("github"))
    assert seen(tmp_path, bench_page(result), width)[2:9] == ["false", "3", "0", "true", "6", "", ""]
    assert seen(tmp_path, compared_page([result, result]), width)[2:9] == ["false", "2", "0", "true", "3", "", ""]


@needs_browser
def test_a_panel_without_data_is_found(tmp_path):
    page = report_page(read_run_log(write_run(tmp_path, lengths=None)))
    assert seen(tmp_path, page)[7] == "panel-lengths"
