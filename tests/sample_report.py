"""Sections such as studies write, for tests of the report: one of every verdict, with figures."""

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Plot

from mkor_bench.report.section import Figure, Section, Table, Verdict, write_section

CONDITIONS = {
    "quick": False,
    "seeds": 3,
    "schedule": "linear warm-up over 10% of the steps, then cosine to 0",
    "threads": 1,
    "machines": [
        {
            "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
            "cores": 2,
            "system": "Linux-6.1.0-18-cloud-amd64-x86_64-with-glibc2.36",
        }
    ],
    "versions": [
        {"python": "3.12.4", "mkor": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.5.5"},
    ],
    "sources": ["5f2c9f0b6a1d4be2"],
    "pieces": 88,
    "processor_hours": 1.73,
}

COMPLEXITY = Section(
    study="complexity",
    title="Cost of an update by width and batch",
    source="Table 1",
    claim="MKOR's update costs O(d²) and no more with a larger batch; K-FAC's costs O(d³).",
    measured="From d = 512 to 4096 MKOR's time grows as d^2.04 and K-FAC's as d^2.88.",
    verdict=Verdict.HOLDS,
    reason="Both exponents are within 0.2 of the claim.",
    tables=(
        Table(
            "Milliseconds of an update of one side, one thread",
            ("method", "d=512", "d=1024", "d=2048", "d=4096", "exponent", "batch matters"),
            (
                ("`mkor`", 0.21, 0.8, 3.1, 12.4, 2.04, False),
                ("`kfac`", 5.2, 35.0, 262.1, 2054.0, 2.88, True),
                ("`eva`", 0.0009, 0.002, 0.0041, 0.0079, 1.01, False),
                ("`hylo-kid`", 98.0, 121.5, None, None, None, True),
            ),
        ),
    ),
    figures=(Figure("complexity.png", "Time of an update against the width d, for each method."),),
)

LEARNING_RATE = Section(
    study="learning-rate",
    title="Epochs to converge over four decades of learning rate",
    source="Table 5",
    claim="MKOR converges in about the same number of epochs for learning rates from 0.01 to 10, "
    "where others diverge or find worse minima.",
    measured="At the learning rate 10 MKOR diverged with all three seeds; from 0.01 to 1 it took "
    "41 to 66 epochs, SGD 52 to 90.",
    verdict=Verdict.FAILS,
    reason="MKOR keeps the gradient's norm, so a rate that is too large for SGD is too large for "
    "it.",
    tables=(
        Table(
            "Epochs to the target, D: diverged, *: ended at a worse loss",
            ("optimizer", "10", "1", "0.1", "0.01"),
            (
                ("mkor", "D", "66*", "41", "58"),
                ("kfac", "D", "112", "90", "89*"),
                ("sgd", "D", "D", "52", "90*"),
            ),
        ),
    ),
)

HYBRID = Section(
    study="hybrid",
    title="What handing over to the base optimizer saves",
    source="section 3.2",
    claim="MKOR-H keeps MKOR's convergence and saves the time of the updates it no longer makes.",
    measured="It ended within 0.4% of MKOR's loss on 4 of 6 tasks and took 0.81 of its time.",
    verdict=Verdict.PARTLY,
    reason="On `shakespeare` and `mnist-convnet` it handed over too early.",
)

SCALING = Section(
    study="scaling",
    title="Steps a second on many workers",
    source="Figure 9",
    claim="MKOR scales on BERT-Large to 64 GPUs like the first-order optimizer.",
    measured="1, 2 and 4 processes on two cores; 64 workers are predicted at 1.07 of LAMB's time.",
    verdict=Verdict.OPEN,
    reason="It takes 64 GPUs to decide; `recipes` has the commands.",
)

SECTIONS = (COMPLEXITY, LEARNING_RATE, HYBRID, SCALING)

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"> & 'quoted' {{ 7 * 7 }} <b>bold"


def hostile_section():
    """A section whose every text tries to be more than text."""
    return Section(
        study=HOSTILE,
        title=HOSTILE,
        source=HOSTILE,
        claim=HOSTILE,
        measured=f"`{HOSTILE}`",
        verdict=Verdict.PARTLY,
        reason="x" * 300 + HOSTILE,
        tables=(Table(HOSTILE, (HOSTILE, "n"), ((HOSTILE, 1.5), ("3" + HOSTILE, 2))),),
        figures=(Figure("hostile.png", HOSTILE),),
    )


def draw(path):
    """A chart as studies draw them."""
    with matplotlib.rc_context({"font.size": 10}):
        plot = Plot(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(plot)
        axes = plot.subplots()
        for name, exponent in (("mkor", 2), ("kfac", 3), ("eva", 1)):
            widths = [512, 1024, 2048, 4096]
            axes.loglog(widths, [(w / 512) ** exponent for w in widths], "o-", label=name)
        axes.set_xlabel("width d")
        axes.set_ylabel("time of an update, relative")
        axes.grid(alpha=0.25, which="both")
        axes.legend()
        plot.savefig(path, dpi=130)


def write_samples(folder, sections=SECTIONS, conditions=CONDITIONS):
    """Writes sections as ``mkor study`` does, each in a folder of its own."""
    for place, section in enumerate(sections):
        own = folder / f"study-{place}"
        own.mkdir(parents=True)
        for figure in section.figures:
            draw(own / figure.file)
        write_section(own, section, conditions)
