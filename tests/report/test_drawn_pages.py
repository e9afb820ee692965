"""report.html as a browser draws it: light, dark, on a phone, on paper; and its colours for colour-blind readers."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import example_with_points, write_example_comparison
from tests.support.observations import SAME_DROPOUT, UNEQUAL, write_observation
from tests.support.programs import needs_programs, reason_no_programs, skip_because
from tests.support.run_folders import plain
from tests.support.scalings import two_strategies
from tests.support.verifications import disagreeing_verdicts
from unipar.backend import ExpertTokens
from unipar.config.sections.strategy import Axes
from unipar.report.charts.svg import fit_name
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.observation_data import ObservationPageData
from unipar.report.data.pipeline_data import PipelineFacts
from unipar.report.data.run_data import RunPageData
from unipar.report.data.verification_data import VerificationPageData
from unipar.report.html.elements import html_page
from unipar.report.pages.comparison_page import render_comparison
from unipar.report.pages.difference_page import render_difference
from unipar.report.pages.experts_section import experts_section
from unipar.report.pages.observation_page import render_observation
from unipar.report.pages.pipeline_section import pipeline_section
from unipar.report.pages.run_page import render_run as of_run
from unipar.report.pages.scaling_page import render_scaling as scaled
from unipar.report.pages.verification_page import render_verification
from unipar.results.training_difference import TrainingDifference
from unipar.results.training_summary import read_training

ROOT = Path(__file__).parents[2]
CSS = (ROOT / "unipar/report/html/page.css").read_text("utf-8")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
DARK = "--blink-settings=preferredColorScheme=0"
needs_browser = skip_because("" if BROWSER else reason_no_programs("chromium"))

LOOK = """
for (const hidden of document.querySelectorAll('details')) hidden.open = true;
const wrong = [];
const light = (c) => {
  const parts = c.match(/[\\d.]+/g).map((v) => c.startsWith('rgb') ? v / 255 : v);
  const [r, g, b] = parts.map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
const paper = getComputedStyle(document.documentElement).backgroundColor;
const root = document.documentElement;
if (root.scrollWidth > innerWidth) wrong.push(`wider than the window: ${root.scrollWidth} > ${innerWidth}`);
let seen = 0;
let labels = 0;
for (const svg of document.querySelectorAll('svg')) {
  if (!svg.getClientRects().length) continue;
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect(), t]);
  seen += texts.length;
  texts.forEach(([words, at, node], i) => {
    if (at.left < -1 || at.right > innerWidth + 1 || at.top < box.top - 3 || at.bottom > box.bottom + 3)
      wrong.push(`cut off: ${words}`);
    if (at.height < 11) wrong.push(`too small: ${words}, ${at.height}`);
    const found = contrast(getComputedStyle(node).fill, paper);
    if (found < 4.5) wrong.push(`pale: ${words}, ${found}`);
    for (const [others, there] of texts.slice(i + 1))
      if (Math.min(at.right, there.right) - Math.max(at.left, there.left) > 1 &&
          Math.min(at.bottom, there.bottom) - Math.max(at.top, there.top) > 3)
        wrong.push(`on one another: ${words}, ${others}`);
  });
  const touch = (a, b) => Math.min(a.right, b.right) > Math.max(a.left, b.left) &&
    Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top);
  const points = [...svg.querySelectorAll('.point')].map((p) => p.getBoundingClientRect());
  const leaders = [...svg.querySelectorAll('.leader')].map((l) => [0, .25, .5, .75, 1].flatMap((part) => {
    const at = l.getPointAtLength(part * l.getTotalLength()).matrixTransform(l.getScreenCTM());
    return {left: at.x, right: at.x + .1, top: at.y, bottom: at.y + .1};
  }));
  for (const label of svg.querySelectorAll('.label')) {
    const at = label.getBoundingClientRect();
    const letters = {left: at.left, right: at.right, top: at.top + 2, bottom: at.bottom - 2};
    labels += 1;
    if (points.some((p) => touch(letters, p))) wrong.push(`on a point: ${label.textContent}`);
    if (leaders.flat().some((l) => touch(letters, l))) wrong.push(`on a leader: ${label.textContent}`);
  }
}
for (const node of document.querySelectorAll('p, h1, h2, h3, li, th, td, summary, caption')) {
  const found = contrast(getComputedStyle(node).color, paper);
  if (found < 4.5) wrong.push(`pale: ${node.textContent}, ${found}`);
}
for (const node of document.querySelectorAll('.key i')) {
  const found = contrast(getComputedStyle(node).borderTopColor, paper);
  if (node.className.startsWith('c-') && found < 3) wrong.push(`pale edge: ${node.className}, ${found}`);
}
parent.document.title = JSON.stringify({width: innerWidth, paper, seen, labels, wrong});
"""


@pytest.fixture
def told(tmp_path: Path) -> ComparisonPageData:
    return ComparisonPageData.read(write_example_comparison(tmp_path / "run", planned=True))


def browse(tmp_path: Path, *words: str) -> str:
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path}/profile", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path).stdout


def looked_at(whole: str, tmp_path: Path, width: int, *flags: str) -> dict[str, Any]:
    """Return the result of LOOK in a page of this width."""
    inner = whole.replace("</body>", f"<script>{LOOK}</script></body>")
    frame = f'<iframe srcdoc="{html.escape(inner)}" style="border:0;width:{width}px;height:900px"></iframe>'
    (tmp_path / "host.html").write_text(f"<!doctype html><title>-</title><body>{frame}</body>", encoding="utf-8")
    drawn = browse(tmp_path, *flags, "--window-size=1400,1000", "--dump-dom", f"file://{tmp_path}/host.html")
    title = re.search("<title>(.*?)</title>", drawn)
    assert title is not None
    return json.loads(html.unescape(title[1]))


@needs_browser
@pytest.mark.parametrize(
    ("width", "flags", "paper"),
    [
        (1280, (), "rgb(252, 252, 250)"),
        pytest.param(1280, (DARK,), "rgb(20, 23, 26)", marks=pytest.mark.sweep),
        pytest.param(390, (), "rgb(252, 252, 250)", marks=pytest.mark.sweep),
        (390, (DARK,), "rgb(20, 23, 26)"),
        pytest.param(880, (), "rgb(252, 252, 250)", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("over", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["one", "two"])
def test_everything_can_be_read(
    told: ComparisonPageData, tmp_path: Path, width: int, flags: tuple[str, ...], paper: str, over: bool
) -> None:
    """No words are cut off, small, pale or on one another, and nothing is wider than the window."""
    before = (
        ComparisonPageData.read(write_example_comparison(tmp_path / "before", scale=1.1, quicker=1.2)) if over else None
    )
    found = looked_at(render_comparison(told, before), tmp_path, width, *flags)
    assert found["wrong"] == []
    assert (found["width"], found["paper"]) == (width, paper)
    assert found["seen"] > 150


@needs_browser
@pytest.mark.parametrize(
    ("flags", "width"),
    [
        pytest.param((), 1280, marks=pytest.mark.sweep),
        ((DARK,), 390),
        pytest.param((), 390, marks=pytest.mark.sweep),
        pytest.param((DARK,), 1280, marks=pytest.mark.sweep),
    ],
    ids=["light-1280", "dark-390", "light-390", "dark-1280"],
)
@pytest.mark.parametrize(
    "kind", ["scaling", "sizes", "run", "verification", "pipeline", "experts", "observation", "difference"]
)
def test_the_other_pages_can_be_read(tmp_path: Path, width: int, flags: tuple[str, ...], kind: str) -> None:
    """Pages of a scaling, comparisons by size, two runs, a verification and observed commands can be read."""
    strong = [
        (w, row) for w, row in zip(two_strategies().worlds, two_strategies().rows, strict=True) if "strong" in w.kinds
    ]
    alone = [(w.changed(kinds=("strong",)), row) for w, row in strong]
    sizes = two_strategies().changed(verb="compare", worlds=tuple(w for w, _ in alone))
    sizes = sizes.changed(rows=[row.changed(strategy=w.name) for w, row in alone])
    before, now = (RunPageData.read(plain(tmp_path / name) / "rank-0.jsonl") for name in ("before", "now"))
    verified = VerificationPageData(folder=tmp_path, verdicts=disagreeing_verdicts(), config={"backend": "native"})
    pipelines = [(p, PipelineFacts(Axes(pipeline=p), m)) for p, m in ((2, 3), (2, 8), (4, 16), (8, 128))]
    spread = ExpertTokens([i % 7 * 1000 for i in range(128)], 1.5, 2.0).to_row()
    experts = {f"model.layers.{i}.feed_forward.experts": spread for i in range(24)}
    seen = write_observation(tmp_path / "seen", findings=(UNEQUAL, SAME_DROPOUT))
    later = write_observation(tmp_path / "later", memory=1.25, loss=0.125)
    whole = {
        "observation": lambda: render_observation(ObservationPageData.read(seen / "observed.json")),
        "difference": lambda: render_difference(TrainingDifference(read_training(seen), read_training(later))),
        "scaling": lambda: scaled(two_strategies(), tmp_path),
        "sizes": lambda: scaled(sizes, tmp_path),
        "run": lambda: of_run(now, before),
        "verification": lambda: render_verification(verified),
        "experts": lambda: html_page("-", "", [experts_section([(1, experts), (9, experts)])]),
        "pipeline": lambda: html_page("-", "", [pipeline_section((f"p{p}", facts) for p, facts in pipelines)]),
    }[kind]()
    found = looked_at(whole, tmp_path, width, *flags)
    assert (found["wrong"], found["width"]) == ([], width)
    assert found["seen"] > (10 if kind == "run" else 20)


@needs_browser
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ((), 1280),
        ((DARK,), 390),
        pytest.param((), 390, marks=pytest.mark.sweep),
        pytest.param((DARK,), 1280, marks=pytest.mark.sweep),
    ],
    ids=["light-1280", "dark-390", "light-390", "dark-1280"],
)
def test_labels_of_many_strategies_can_be_read(
    told: ComparisonPageData, tmp_path: Path, width: int, flags: tuple[str, ...]
) -> None:
    """As a browser draws them, labels of 4, 12 and 25 strategies touch neither another, nor a point, nor a leader."""
    figures: list[str] = []
    for count in (4, 12, 25):
        points = [(100.0 + i % 5 * 3 + i, 30.0 + i % 7) for i in range(count)]
        figures.append(render_comparison(example_with_points(told, points)).partition('<section id="pareto">')[2])
    sections = "".join(f"<section>{text.partition('</section>')[0]}</section>" for text in figures)
    found = looked_at(html_page("-", "", [sections]), tmp_path, width, *flags)
    assert (found["wrong"], found["labels"]) == ([], 4 + 12 + 25)


LONGEST_NAME = "native/parameters+tensor2+pipeline2+context2+sequence+interleaved"


@needs_browser
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.sweep)])
def test_long_names_of_strategies_can_be_read(tmp_path: Path, width: int) -> None:
    """With all axes of a mesh a name is wider than a phone: figures shorten it, and text breaks it."""
    folder = write_example_comparison(tmp_path / "run")
    (file,) = folder.rglob("compare.json")
    text = file.read_text("utf-8").replace('"native/parameters"', f'"{LONGEST_NAME}"')
    file.write_text(text.replace('"native/nothing"', '"native/parameters+tensor2+pipeline2"'), encoding="utf-8")
    found = looked_at(render_comparison(ComparisonPageData.read(folder)), tmp_path, width)
    assert found["wrong"] == []


def test_names_in_figures_are_shortened_where_they_must_be() -> None:
    """Axes get the short names that the field uses; what is too long then is cut."""
    assert fit_name(LONGEST_NAME, 500) == LONGEST_NAME
    assert fit_name(LONGEST_NAME, 350) == "native/parameters+tp2+pp2+cp2+sp+interleaved"
    assert fit_name(LONGEST_NAME, 100) == "native/param…"
    assert fit_name("deepspeed/gradients+library", 190) == "deepspeed/gradients+libra…"


@needs_browser
@needs_programs("pdftotext")
def test_on_paper_nothing_is_folded_away(told: ComparisonPageData, tmp_path: Path) -> None:
    """On paper the tables behind the figures are open, and not cut."""
    (tmp_path / "report.html").write_text(render_comparison(told), encoding="utf-8")
    browse(tmp_path, f"--print-to-pdf={tmp_path}/x.pdf", "--no-pdf-header-footer", f"file://{tmp_path}/report.html")
    command = ["pdftotext", "-layout", f"{tmp_path}/x.pdf", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Bytes by category at the peak" in text
    assert "train.optimizer.fused: false" in text
    assert re.search(r"native/parameters +backward +97 MiB .* 2.4 MiB\n", text)


@needs_browser
@pytest.mark.sweep
@needs_programs("pdftotext")
def test_a_verification_on_paper(tmp_path: Path) -> None:
    """On paper the tables behind a verification's figures are open, and not cut."""
    page = VerificationPageData(folder=tmp_path, verdicts=disagreeing_verdicts(), config={"backend": "native"})
    (tmp_path / "report.html").write_text(render_verification(page), encoding="utf-8")
    browse(tmp_path, f"--print-to-pdf={tmp_path}/x.pdf", "--no-pdf-header-footer", f"file://{tmp_path}/report.html")
    command = ["pdftotext", "-layout", f"{tmp_path}/x.pdf", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"allowed +(1.0e-06 +){9}1.0e-06\n", text)
    assert re.search(r"deepspeed/parameters +8.1e\+02 +0.00 +8.1e\+02 +4.1e\+02 +2.0e\+02\n", text)


MACHADO = {
    "nobody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""Matrices of how linear red, green and blue are seen (Machado, Oliveira and Fernandes 2009, severity 1)."""


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    r, g, b = (min(max(sum(m * v for m, v in zip(row, linear, strict=True)), 0), 1) for row in seen)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("who", MACHADO)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_categories_can_be_told_apart(who: str, scheme: int) -> None:
    """Any two colours differ by 14 in CIELAB, whoever looks; 2 is what an eye can just see."""
    block = CSS.split("prefers-color-scheme: dark")[scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    categories = re.findall(r"^\.c-(\w+) ", CSS, re.MULTILINE)
    assert len(categories) == 11
    seen = {name: lab(colours[name], MACHADO[who]) for name in categories}
    apart = {(a, b): math.dist(seen[a], seen[b]) for a, b in itertools.combinations(categories, 2)}
    assert {pair: off for pair, off in apart.items() if off < 14} == {}
