"""The section of a study: what is written is what the report reads."""

import json

import pytest

from mkor_bench.report.section import (
    Figure,
    Section,
    Table,
    Verdict,
    read_section,
    to_markdown,
    write_section,
)

TABLE = Table("Cost in ms", ("method", "time", "met"), (("mkor|a", 1.23456, True), ("x", None, 3)))
SECTION = Section(
    study="complexity",
    title="Cost of a step",
    source="Table 1",
    claim="MKOR's cost grows as d².",
    measured="It grows as d^2.04.",
    verdict=Verdict.PARTLY,
    reason="Below d = 512 other things cost more.",
    tables=(TABLE,),
    figures=(Figure("complexity.png", "time against d"),),
)


def test_a_section_is_read_as_it_was_written(tmp_path):
    files = write_section(tmp_path, SECTION, {"seeds": 3}, {"times": [1.0, float("inf")]})
    assert files == ("complexity.json", "complexity.md", "complexity.png")
    assert read_section(tmp_path / "complexity.json") == (SECTION, {"seeds": 3})
    assert json.loads((tmp_path / "complexity.json").read_text())["data"] == {"times": [1.0, None]}


def test_markdown_tells_claim_measurement_verdict_and_table():
    text = to_markdown(SECTION)
    assert text.startswith("## Cost of a step (Table 1)\n")
    assert "**Verdict: holds in part.** Below d = 512" in text
    assert "| mkor\\|a | 1.235 | yes |\n| x | – | 3 |" in text
    assert "![time against d](complexity.png)" in text


def test_other_json_is_no_section(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"format": 1}')
    assert read_section(path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99, "section": {}}', "it has format 99, and this version of mkor reads 1"),
        ('{"format": 1, "section": {}}', "its section is incomplete"),
        ('{"format": 1, "study": "rank"}', "its section is incomplete"),
        ("{", "Expecting property name"),
    ],
)
def test_a_damaged_section_is_refused(tmp_path, content, message):
    path = tmp_path / "complexity.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_section(path)


def test_a_number_that_no_study_writes_is_refused(tmp_path):
    write_section(tmp_path, SECTION, {})
    path = tmp_path / "complexity.json"
    path.write_text(path.read_text().replace("1.23456", "1" + 400 * "0"))
    with pytest.raises(ValueError, match="has a cell that is no text and no usual number"):
        read_section(path)
