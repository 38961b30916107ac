"""The page in a real browser: it renders without a complaint, answers hover, keys and clicks, prints, and fits a phone."""

from __future__ import annotations

import json
import os
import re
import zlib
from itertools import pairwise

import pytest

from tests.report.chromium import PROGRAM, Browser
from tests.report.runs import BAD, make_run
from tptopk.report.page import write_page

if PROGRAM is None and os.environ.get("CI"):
    raise RuntimeError("Chromium is not installed, and CI does not go without: apt-get install chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run, the same with hostile words in its files and a failed check, and several."""
    place = tmp_path_factory.mktemp("pages")
    run = make_run(place / "run")
    dense = make_run(place / "dense", "dp-sgd", seed=1)
    write_page([run], place / "one.html")
    write_page([run, dense], place / "several.html")
    summary = json.loads((run / "run.json").read_text())
    summary["config"] |= {"data": BAD, BAD: BAD}
    summary["test"][BAD] = 1.0
    (run / "run.json").write_text(json.dumps(summary))
    (run / "plan.json").write_text("{}")
    (run / "audit.json").write_text(json.dumps({"verdict": BAD, "at_least": {BAD: 1.0}}))
    write_page([run], place / "hostile.html", title=BAD)
    return {name: place / f"{name}.html" for name in ("one", "several", "hostile")}


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


CHART = "document.querySelector('.chart')"
READOUT = f"{CHART}.querySelector('.readout').textContent"


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
@pytest.mark.parametrize("dark", [False, True])
def test_renders_without_a_word_on_the_console_or_the_network(browser, pages, name, dark):
    browser.open(pages[name], dark=dark)
    assert browser.run("document.querySelectorAll('svg').length") > 3
    assert browser.picture().startswith(b"\x89PNG")
    assert browser.messages == [] and browser.requests == [pages[name].resolve().as_uri()]


def test_hostile_words_stay_words(browser, pages):
    browser.open(pages["hostile"])
    assert "<script>" in browser.run("document.title") and browser.run("document.scripts.length") == 1
    assert browser.run("document.images.length") == 0
    assert "FAIL" in browser.run("document.querySelector('.claim .lead').innerText")
    red = browser.run("getComputedStyle(document.querySelector('.claim .lead')).color")
    r, g, b = map(int, re.findall(r"\d+", red))
    assert r > 2 * g and r > 2 * b
    assert browser.run("document.querySelector('.claim').getBoundingClientRect().top") < 300


def test_the_theme_can_be_switched(browser, pages):
    def ground() -> int:
        found = browser.run("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", found)[:3]))

    for dark in (False, True):
        browser.open(pages["one"], dark=dark)
        before = ground()
        assert (before < 200) == dark
        browser.run("document.getElementById('theme').click()")
        assert (ground() < 200) != dark
        browser.run("document.getElementById('theme').click()")
        assert ground() == before


def test_curves_say_their_values_on_hover_and_by_keys(browser, pages):
    browser.open(pages["one"])
    assert browser.run(READOUT) == ""
    browser.run(f"{CHART}.scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.run(
        f"(({{x, y, width, height}}) => [x, y, width, height])({CHART}.getBoundingClientRect())"
    )
    browser.move(left + width / 2, top + height / 2)
    assert re.fullmatch(r"steps charged: \d+\nε: [\d.]+", browser.run(READOUT))
    browser.move(1, 1)
    assert browser.run(READOUT) == ""
    browser.run(f"{CHART}.focus()")
    assert browser.run(READOUT).startswith("steps charged: 60\n")
    browser.press("Home")
    assert browser.run(READOUT) == "steps charged: 0\nε: 0"
    browser.press("ArrowRight")
    second = browser.run(READOUT)
    assert second != "steps charged: 0\nε: 0"
    browser.press("Escape")
    assert browser.run(READOUT) == "" and browser.messages == []


def test_details_open_and_close_together(browser, pages):
    browser.open(pages["several"])
    still = "[...document.querySelectorAll('main details')].filter(item => !item.open).length"
    assert browser.run(still) > 0
    browser.run("document.getElementById('details').click()")
    assert browser.run(still) == 0
    browser.run("document.getElementById('details').click()")
    assert browser.run(still) == browser.run("document.querySelectorAll('main details').length")


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 768])
def test_fits_the_width_of_a_phone(browser, pages, name, width):
    browser.open(pages[name], width=width, height=844)
    browser.run("document.getElementById('details').click()")
    assert browser.run("document.documentElement.scrollWidth") <= width
    smallest = browser.run(
        "Math.min(...[...document.querySelectorAll('.chart')].filter(c => c.clientWidth).map(c => c.clientWidth))"
    )
    assert smallest > 0.7 * min(width, 400)


def test_on_a_phone_no_table_hides_a_column(browser, pages):
    browser.open(pages["several"], width=390, height=844)
    browser.run("document.getElementById('details').click()")
    hidden = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1).length"
    assert browser.run("document.querySelectorAll('.scroll').length") > 5 and browser.run(hidden) == 0
    label = "getComputedStyle(document.querySelector('td[data-label]'), '::before').content"
    assert browser.run(label) == '"runs"'


def test_prints_everything_to_pdf(browser, pages):
    browser.open(pages["one"])
    printed = browser.pdf()
    assert printed.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 20
    browser.ask("Emulation.setEmulatedMedia", media="print")
    hidden = browser.run("getComputedStyle(document.querySelector('.buttons')).display")
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.ask("Emulation.setEmulatedMedia", media="")
    assert hidden == "none" and ground == "rgb(255, 255, 255)"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("[...document.querySelectorAll('main details')].every(item => item.open)")
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert not browser.run("document.querySelector('.statement').open")


def test_reads_without_script(browser, pages):
    browser.open(pages["one"], script=False)
    shown = browser.ask("DOM.getDocument", depth=1)["root"]["nodeId"]
    buttons = browser.ask("DOM.querySelector", nodeId=shown, selector=".buttons[hidden]")["nodeId"]
    assert buttons != 0 and len(zlib.compress(browser.picture())) > 20_000
    browser.ask("Emulation.setScriptExecutionDisabled", value=False)


CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (item) => {
    for (; item; item = item.parentElement) {
      const found = getComputedStyle(item).backgroundColor;
      if (!/, 0\\)$/.test(found) && found !== 'transparent') return found;
    }
    return 'rgb(255, 255, 255)';
  };
  const worst = [21, ''];
  for (const item of document.querySelectorAll('body *')) {
    if (![...item.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || ['SCRIPT', 'title'].includes(item.tagName)) continue;
    const style = getComputedStyle(item), ink = item instanceof SVGElement ? style.fill : style.color;
    const a = light(ink), b = light(behind(item)), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) { worst[0] = ratio; worst[1] = item.outerHTML.slice(0, 80); }
  }
  return worst;
})()"""


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
@pytest.mark.parametrize("dark", [False, True])
def test_text_has_the_contrast_that_wcag_asks_for(browser, pages, name, dark):
    browser.open(pages[name], dark=dark)
    browser.run("document.getElementById('details').click()")
    ratio, where = browser.run(CONTRAST)
    assert ratio >= 4.5, where


@pytest.mark.parametrize("name", ["one", "several"])
def test_headings_follow_each_other_and_drawings_have_names(browser, pages, name):
    browser.open(pages[name])
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert browser.run("[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('aria-label'))")
    assert browser.run("document.documentElement.lang") == "en"
