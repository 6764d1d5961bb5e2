"""The page of ``mkor report`` in a real browser, at the sizes of a phone and of a desktop."""

import base64
import sys

import pytest

import sample_report
from browser import Browser, find_browser
from mkor_bench.report.collect import find_sections
from mkor_bench.report.page import write_page
from mkor_bench.report.section import write_section

PATH = find_browser()
pytestmark = [
    pytest.mark.skipif(PATH is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(sys.platform == "win32", reason="drives the browser over inherited pipes"),
]
SIZES = (360, 1280)
SCHEMES = ("light", "dark")
TABLE = "document.querySelector('#s1').closest('section').querySelector('table')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(PATH, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of the samples, and of texts that are hard to fit and to trust."""
    folder = tmp_path_factory.mktemp("page")
    sample_report.write_samples(folder)
    sample_report.draw(folder / "hostile.png")
    section = {**vars(sample_report.hostile_section()), "study": "hostile"}
    write_section(folder, type(sample_report.COMPLEXITY)(**section), {"seeds": 3})
    write_page(folder, find_sections(folder))
    return folder / "report.html"


@pytest.fixture
def quiet(browser):
    """The browser; fails a test whose page asked the network for anything, or complained."""
    browser.requests.clear()
    browser.complaints.clear()
    yield browser
    kinds = {address.partition(":")[0] for address in browser.requests}
    assert kinds == {"file", "data"}
    assert [a for a in browser.requests if a.startswith("file") and "report.html" not in a] == []
    assert browser.complaints == []


def column(browser, number):
    return browser.evaluate(f"[...{TABLE}.tBodies[0].rows].map(r => r.cells[{number}].textContent)")


def directions(browser):
    return browser.evaluate(
        f"[...{TABLE}.tHead.rows[0].cells].map(h => h.getAttribute('aria-sort'))"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
def test_no_page_is_wider_than_its_window(quiet, page, width, scheme):
    quiet.open(page, width=width, scheme=scheme)
    quiet.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert quiet.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width] * 2
    quiet.evaluate("scrollTo(500, 0)")
    assert quiet.evaluate("scrollX") == 0
    inside = "document.querySelector('#s1').closest('section').querySelector('.scroll')"
    wider = quiet.evaluate(f"{inside}.scrollWidth > {inside}.clientWidth")
    assert wider == (width == 360)  # the table scrolls in its own box


@pytest.mark.parametrize(("scheme", "ground"), [("light", "255, 255, 255"), ("dark", "20, 23, 27")])
def test_the_page_follows_the_colours_of_the_system(quiet, page, scheme, ground):
    quiet.open(page, width=1280, scheme=scheme)
    assert quiet.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({ground})"


def test_a_click_sorts_by_value_and_the_next_turns_it_round(quiet, page):
    quiet.open(page, width=1280)
    heading = f"{TABLE}.tHead.rows[0].cells[1].firstElementChild"
    quiet.evaluate(f"{heading}.click()")
    assert column(quiet, 1) == ["9.00e-04", "0.2100", "5.200", "98.00"]
    assert directions(quiet) == [None, "ascending", None, None, None, None, None]
    quiet.evaluate(f"{heading}.click()")
    assert column(quiet, 1) == ["98.00", "5.200", "0.2100", "9.00e-04"]
    assert directions(quiet)[1] == "descending"


def test_words_are_sorted_as_words_and_what_is_not_known_comes_last(quiet, page):
    quiet.open(page, width=1280)
    quiet.evaluate(f"{TABLE}.tHead.rows[0].cells[0].firstElementChild.click()")
    assert column(quiet, 0) == ["eva", "hylo-kid", "kfac", "mkor"]
    unknown = f"{TABLE}.tHead.rows[0].cells[5].firstElementChild.click()"
    for expected in (["1.010", "2.040", "2.880", "–"], ["2.880", "2.040", "1.010", "–"]):
        quiet.evaluate(unknown)
        assert column(quiet, 5) == expected
    assert directions(quiet)[0] is None


@pytest.mark.parametrize(("key", "code", "text"), [("Enter", 13, "\r"), (" ", 32, " ")])
def test_the_keyboard_sorts_too(quiet, page, key, code, text):
    quiet.open(page, width=1280)
    quiet.evaluate(f"{TABLE}.tHead.rows[0].cells[0].firstElementChild.focus()")
    quiet.press("Tab", 9)
    assert quiet.evaluate("document.activeElement.textContent") == "d=512"
    assert quiet.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    quiet.press(key, code, text)
    assert column(quiet, 1) == ["9.00e-04", "0.2100", "5.200", "98.00"]


def test_the_first_tab_offers_to_skip_to_the_findings(quiet, page):
    quiet.open(page, width=360)
    quiet.press("Tab", 9)
    assert quiet.evaluate("document.activeElement.getAttribute('href')") == "#main"
    assert quiet.evaluate("document.activeElement.getBoundingClientRect().left") >= 0


def test_no_hostile_text_does_anything(quiet, page):
    quiet.open(page, width=1280)
    assert quiet.evaluate("document.title") == "MKOR: the paper's claims, measured"
    assert quiet.evaluate("document.images.length") == 2
    assert quiet.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 500)")


def test_a_script_that_got_in_would_not_run(browser, page, tmp_path):
    injected = tmp_path / "report.html"
    text = page.read_text(encoding="utf-8")
    injected.write_text(
        text.replace("</main>", "<script>document.title = 'broken'</script></main>")
    )
    browser.open(injected, width=1280)
    assert browser.evaluate("document.title") == "MKOR: the paper's claims, measured"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_without_scripts_the_tables_are_there(quiet, page):
    quiet.open(page, width=1280, script=False)
    assert quiet.evaluate("document.querySelectorAll('table').length") == 5
    assert quiet.evaluate("document.querySelectorAll('th button').length") == 0


def test_names_and_roles_reach_assistive_technology(quiet, page):
    quiet.open(page, width=1280)
    quiet.evaluate(f"{TABLE}.tHead.rows[0].cells[1].firstElementChild.click()")
    nodes = quiet.call("Accessibility.getFullAXTree")["nodes"]
    known = {(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes}
    assert ("navigation", "Contents") in known
    assert ("table", "Milliseconds of an update of one side, one thread") in known
    assert ("image", sample_report.COMPLEXITY.figures[0].text) in known
    assert ("button", "d=512 ↑") in known or ("button", "d=512") in known
    unnamed = [
        role for role, name in known if role in {"button", "link", "image", "table"} and not name
    ]
    assert unnamed == []


def test_it_prints_whole_and_on_white(browser, page):
    browser.open(page, width=1280, scheme="dark", media="print")
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    printed = base64.b64decode(browser.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
