"""``mkor report``: what is on the page, what is refused, and what is left as it was."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import mkor_bench.report.page as page_module
import sample_report
from mkor_bench.report.collect import find_sections
from mkor_bench.report.page import code, in_short, sorted_as, to_html, told
from mkor_bench.report.section import Table, Verdict, write_section
from sample_report import COMPLEXITY, CONDITIONS, HOSTILE, LEARNING_RATE, SECTIONS, write_samples

VOID = {"meta", "link", "img"}


class Tree(HTMLParser):
    """The elements of a page with their attributes and texts; what isn't closed is an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, **dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **having):
        """Elements by tag and attributes."""
        return [
            element
            for element in self.elements
            if element["tag"] == tag and having.items() <= element.items()
        ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page of the sample sections."""
    folder = tmp_path_factory.mktemp("report")
    write_samples(folder)
    return Tree(to_html(find_sections(folder)))


def test_the_command_writes_the_page_and_tells_the_verdicts(mkor, tmp_path):
    write_samples(tmp_path / "runs")
    result = mkor("report", "runs")
    assert result.exit_code == 0, result.output
    assert "learning-rate   Table 5       does not hold" in result.stdout
    assert "Written to runs/report.html" in result.stdout
    text = (tmp_path / "runs/report.html").read_text(encoding="utf-8")
    assert text == to_html(find_sections(tmp_path / "runs"))
    assert sorted(p.name for p in (tmp_path / "runs").iterdir() if p.is_file()) == ["report.html"]


def test_every_section_is_there_and_in_the_contents(made):
    titles = [heading["text"] for heading in made.all("h2")]
    order = [section.title for section in sorted(SECTIONS, key=lambda section: section.study)]
    assert titles == ["Contents", "Summary", "What did not hold", "What was run", *order]
    (nav,) = made.all("nav")
    assert all(title in nav["text"] for title in titles[1:])
    ids = {element["id"] for element in made.elements if "id" in element}
    links = [link["href"] for link in made.all("a")]
    assert {link.removeprefix("#") for link in links} <= ids
    assert len(made.all("h1")) == 1 and made.all("html", lang="en")


def test_a_claim_that_did_not_hold_is_told_at_the_top(made):
    (header,) = made.all("header")
    assert "1 holds, 1 holds in part, 1 does not hold and 1 is not decided here." in header["text"]
    (failed,) = made.all("section", **{"aria-labelledby": "failed"})
    assert LEARNING_RATE.claim in failed["text"] and LEARNING_RATE.measured in failed["text"]


def test_claim_measurement_verdict_and_conditions_are_told(made):
    (section,) = made.all("section", **{"aria-labelledby": "s3"})
    for text in (LEARNING_RATE.claim, LEARNING_RATE.measured, LEARNING_RATE.reason):
        assert text in section["text"]
    assert "The claim does not hold here." in section["text"]
    assert "mkor study learning-rate" in section["text"]
    (last,) = made.all("section", **{"aria-labelledby": "s4"})
    assert "The claim is not decided here. It takes 64 GPUs" in last["text"]
    for text in ("processor time, h", "Xeon", "torch 2.13.0+cpu", "5f2c9f0b6a1d4be2"):
        assert text in section["text"]


def test_numbers_are_sorted_by_their_value_and_stand_in_line(made):
    (section,) = made.all("section", **{"aria-labelledby": "s1"})
    cells = made.all("td", **{"class": "number"})
    assert {"tag": "td", "class": "number", "data-value": "0.0009", "text": "9.00e-04"} in cells
    assert {"tag": "td", "class": "number", "text": "–"} in cells
    assert "9.00e-04" in section["text"]
    headings = {h["text"]: h.get("class") for h in made.all("th", scope="col")}
    assert headings["exponent"] == "number" and headings["batch matters"] is None


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (1.5, "1.5"),
        (3, "3.0"),
        (True, "1.0"),
        (None, ""),
        (float("nan"), ""),
        ("1.98 ± 0.02", "1.98"),
        ("×2.6", "2.6"),
        ("−3e-4", "-3e-4"),
        ("89*", "89"),
        ("D", ""),
        ("adamw", ""),
        ([1], ""),
    ],
)
def test_what_a_cell_is_sorted_by(cell, value):
    assert sorted_as(cell) == value


def test_conditions_are_told_however_deep():
    deep = {"a": [1, 2.5, None], "b": [{"c": True}, {"c": False}], "d": {}, "e": []}
    assert told(deep) == "a 1, 2.500, –, b c yes; c no, d –, e –"


def test_the_summary_tells_reasons_in_short(tmp_path):
    assert in_short("Met: 2.04, at most 2.3. Not met: more.") == "Met: 2.04, at most 2.3."
    assert in_short("a b") == "a b"
    assert in_short("word " * 40) == "word " * 27 + "…"
    many = replace(LEARNING_RATE, reason="It is so. " + "It goes on. " * 20, tables=())
    write_section(tmp_path, many, CONDITIONS)
    page = Tree(to_html(find_sections(tmp_path)))
    assert page.all("td", **{"class": "words"})[0]["text"] == "It is so."
    assert page.all("section", **{"aria-labelledby": "s1"})[0]["text"].count("It goes on.") == 20


def test_text_between_backticks_is_code():
    assert code("a `<b>` & `c") == "a <code>&lt;b&gt;</code> &amp; `c"


def test_no_text_of_a_section_becomes_markup(tmp_path, made):
    section = sample_report.hostile_section()
    sample_report.draw(tmp_path / "hostile.png")
    write_section(tmp_path, replace(section, study="hostile"), {HOSTILE: [HOSTILE]})
    path = tmp_path / "hostile.json"
    content = json.loads(path.read_text())
    content["section"]["study"] = HOSTILE
    path.write_text(json.dumps(content))
    hostile = Tree(to_html(find_sections(tmp_path)))
    assert {element["tag"] for element in hostile.elements} <= {e["tag"] for e in made.elements}
    assert [image["alt"] for image in hostile.all("img")] == [HOSTILE]
    assert not any(name.startswith("on") for element in hostile.elements for name in element)
    assert len(hostile.all("script")) == 1
    assert hostile.all("h2", id="s1")[0]["text"] == HOSTILE
    assert [t["text"] for t in hostile.all("td") if t.get("data-value") == "3"] == [f"3{HOSTILE}"]


def test_a_text_that_is_no_unicode_is_still_a_page(mkor, tmp_path):
    write_section(tmp_path, replace(COMPLEXITY, figures=()), CONDITIONS)
    path = tmp_path / "complexity.json"
    path.write_text(path.read_text().replace("MKOR's update", "\\ud800 update"))
    assert mkor("report", tmp_path).exit_code == 0
    assert "? update costs" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_besides_itself(made):
    addresses = [
        element[name]
        for element in made.elements
        for name in ("src", "href", "action", "srcset", "data")
        if name in element
    ]
    assert {address[:5] for address in addresses if not address.startswith("#")} == {"data:"}
    (style,), (script,) = made.all("style"), made.all("script")
    assert not re.search(r"url\(|@import|https?:|fetch\(|import\(", style["text"] + script["text"])
    (policy,) = made.all("meta", **{"http-equiv": "Content-Security-Policy"})
    for text in (style["text"], script["text"]):
        assert f"'{page_module.policy_hash(text)}'" in policy["content"]
    assert policy["content"].startswith("default-src 'none'; img-src data:;")


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(share * p for share, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_words_can_be_read_on_their_ground_in_both_schemes(made):
    (style,) = made.all("style")
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6});", block))
        for block in re.findall(r":root \{(.*?)\}", style["text"], re.DOTALL)
    ]
    light, dark = schemes[:2]
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        for ground in ("ground", "raised"):
            for word in ("text", "soft", "link", "focus", *(v.name.lower() for v in Verdict)):
                pair = sorted((luminance(scheme[ground]), luminance(scheme[word])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (ground, word)


def test_several_sizes_of_a_study_are_all_shown(tmp_path):
    plain = replace(COMPLEXITY, figures=())
    for name, quick in (("complexity", False), ("complexity-quick", True)):
        (tmp_path / name).mkdir()
        write_section(tmp_path / name, plain, {**CONDITIONS, "quick": quick})
    (tmp_path / "complexity/results.json").write_text('{"format": 1}')
    (tmp_path / "complexity/.complexity.12.json").write_text('{"format": 1, "sec')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/abc.json").write_text("half")
    found = find_sections(tmp_path)
    assert [str(each.path) for each in found] == [
        "complexity/complexity.json",
        "complexity-quick/complexity.json",
    ]
    page = Tree(to_html(found))
    assert len({heading["id"] for heading in page.all("h2")}) == len(page.all("h2"))
    assert "its figures decide nothing" in page.all("main")[0]["text"]


def test_conditions_that_no_study_writes_are_shown(tmp_path):
    plain = replace(COMPLEXITY, figures=(), tables=(Table("empty", ("a", "b"), ()),))
    write_section(
        tmp_path, plain, {"quick": ["?"], "machines": "one", "versions": [3], "seeds": {}}
    )
    assert "one" in to_html(find_sections(tmp_path))


DAMAGES = {
    "cut off": (lambda text: text[: len(text) // 2], "complexity.json' ("),
    "empty": (lambda text: "", "complexity.json' (Expecting value"),
    "newer": (lambda text: text.replace('"format": 1', '"format": 99'), "it has format 99"),
    "no verdict": (lambda text: text.replace('"holds"', '"maybe"'), "'maybe' is not a valid"),
    "a number as title": (
        lambda text: re.sub(r'"title": ".*?"', '"title": 7', text),
        "its title is no text but 7",
    ),
    "a short row": (
        lambda text: text.replace('"exponent",', "", 1),
        "has 6 columns and a row of 7",
    ),
    "a list as cell": (lambda text: text.replace("2.04,", "[],", 1), "has a cell that is no text"),
    "a figure elsewhere": (
        lambda text: text.replace("complexity.png", "../secret.png"),
        "its figure '../secret.png' does not lie beside it",
    ),
    "no figure": (
        lambda text: text.replace("complexity.png", "lost.png"),
        "lost.png: No such file or directory",
    ),
    "no picture": (
        lambda text: text.replace("complexity.png", "complexity.md"),
        "its figure 'complexity.md' is no complete PNG file",
    ),
    "conditions": (
        lambda text: re.sub(
            r'"conditions": \{.*\},\n  "section"',
            '"conditions": 3, "section"',
            text,
            flags=re.DOTALL,
        ),
        "its conditions are no object but int",
    ),
    "too deep": (lambda text: "[" * 200_000, "its JSON is nested too deeply"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_section_is_named_and_nothing_is_written(mkor, tmp_path, damage):
    write_samples(tmp_path / "runs")
    path = tmp_path / "runs/study-0/complexity.json"
    change, message = DAMAGES[damage]
    path.write_text(change(path.read_text()))
    result = mkor("report", "runs")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: a file is damaged: 'runs/study-0/complexity.json' (")
    assert message in result.stderr
    assert "Write it anew with mkor study NAME --report --output FOLDER" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs/report.html").exists()


def test_all_damaged_files_are_named_and_an_older_page_stays(mkor, tmp_path):
    write_samples(tmp_path)
    (tmp_path / "report.html").write_text("older")
    picture = tmp_path / "study-0/complexity.png"
    picture.write_bytes(picture.read_bytes()[:-20])
    (tmp_path / "study-1/learning-rate.json").write_text("{")
    result = mkor("report", tmp_path)
    assert result.exit_code == 2
    assert "2 files are damaged: " in result.stderr
    assert "its figure 'complexity.png' is no complete PNG file" in result.stderr
    assert "study-1/learning-rate.json' (Expecting property name" in result.stderr
    assert (tmp_path / "report.html").read_text() == "older"


def test_a_folder_without_sections_is_told_what_makes_them(mkor, tmp_path):
    (tmp_path / "runs").mkdir()
    result = mkor("report", "runs")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Error: 'runs' holds no section of a report: do a study first, such as mkor study "
    )
    assert list((tmp_path / "runs").iterdir()) == []
    result = mkor("report", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere' is not a folder: name the --output of mkor study" in result.stderr


def test_a_full_disk_leaves_the_older_page(mkor, tmp_path, monkeypatch):
    write_samples(tmp_path / "runs")
    page = tmp_path / "runs/report.html"
    page.write_text("older")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mkor_bench.files.os.fsync", fail)
    result = mkor("report", "runs")
    assert result.exit_code == 2
    assert "'runs/report.html' cannot be written (No space left on device)" in result.stderr
    assert page.read_text() == "older"
    assert [p.name for p in (tmp_path / "runs").iterdir() if p.is_file()] == ["report.html"]


def test_a_folder_in_the_place_of_the_page_is_told(mkor, tmp_path):
    write_samples(tmp_path)
    (tmp_path / "report.html").mkdir()
    result = mkor("report", tmp_path)
    assert result.exit_code == 2
    assert "report.html' is a folder where the report is to be written" in result.stderr
