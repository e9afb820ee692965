"""Sections of the comparison page on planning: predicted beside measured memory, and predicted peaks by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from unipar.backend import Category
from unipar.report.charts.forecast_chart import (
    draw_forecast_pairs,
    draw_peaks_by_ranks,
    format_difference,
    scale_of_pairs,
)
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.forecast_data import forecast_lines, ranks_with_other_batch
from unipar.report.data.headline import CATEGORY_LABELS
from unipar.report.html.elements import (
    NO_VALUE,
    bullet_list,
    colour_key,
    columns_table,
    html_figure,
    html_section,
    html_table,
    paragraph,
)
from unipar.report.pages.memory.columns import held_categories
from unipar.results.forecast.forecast_difference import (
    FORECAST_COLUMNS,
    ForecastDifference,
    describe_refusals,
    forecast_differences,
    summarise_differences,
)
from unipar.results.forecast.records import Forecast, StrategyForecast
from unipar.utils.columns import Column, choose_columns
from unipar.utils.text import count_of, format_duration, format_size

_TITLE: Final = "Predicted and measured memory"


def forecast_section(page: ComparisonPageData) -> str:
    """Return the section on predicted beside measured memory and bytes sent, or a sentence on why there is none."""
    forecast = page.comparison.forecast
    if forecast is None:
        why = (
            "Nothing was predicted for this comparison: strategies are planned once they have ended, unless "
            "compare.memory is false; earlier versions did not plan. `unipar plan` predicts memory for a config."
        )
        return html_section("planned", _TITLE, paragraph(why))
    if forecast.problem:
        why = f"There are no predictions: {forecast.problem}."
        return html_section("planned", _TITLE, paragraph(why, "worry"))
    pairs = forecast_differences(forecast, page.comparison.rows)
    pairs.sort(key=lambda each: each.measured.peak)
    return html_section(
        "planned",
        _TITLE,
        *(_compared_parts(pairs) if pairs else _planned_parts(page, forecast)),
        bullet_list(_sentences(forecast, pairs)),
    )


def _compared_parts(pairs: Sequence[ForecastDifference]) -> Iterator[str]:
    shown = held_categories(held for each in pairs for held in (each.measured.held, each.planned.peak.held))
    cut = [
        f"{e.strategy} holds {format_size(e.measured.peak)}" for e in pairs if e.strategy in scale_of_pairs(pairs)[1]
    ]
    sentence = summarise_differences(pairs)
    yield paragraph(f"{sentence[:1].upper()}{sentence[1:]}.")
    yield paragraph(
        "Upper bar: the measured peak of a step, on the fullest rank, without what libraries and Python hold for "
        "themselves, and without setting up. Lower bar: the peak that unipar plan predicts from the config, without "
        "running it. Beside it the difference from the range of the measured steps."
    )
    yield colour_key((f"c-{c}", CATEGORY_LABELS[c]) for c in shown)
    yield paragraph(
        f"A bar with a gap is cut short, so that all others stay readable: {', '.join(cut)}." if cut else ""
    )
    yield html_figure(lambda width: draw_forecast_pairs(pairs, width), _category_table(pairs, shown))
    planned, sent = choose_columns(FORECAST_COLUMNS, "planned_peak", "measured_sent")
    columns: list[Column[ForecastDifference]] = [
        Column("strategy", lambda each: each.strategy, right=False),
        Column("measured", _measured_range),
        Column("in", lambda each: each.measured.phase, right=False),
        planned,
        Column("in", lambda each: each.planned.peak.name, right=False),
        Column("difference", lambda each: each.off, format_difference),
        sent,
        Column("sent, predicted", _planned_volume),
    ]
    yield columns_table(columns, pairs, "Peak and bytes sent in a step, measured and predicted")


def _category_table(pairs: Sequence[ForecastDifference], shown: Sequence[Category]) -> str:
    rows: list[list[str]] = []
    for each in pairs:
        for what, held in (("measured", each.measured.held), ("predicted", each.planned.peak.held)):
            parts = [format_size(held[c]) if held.get(c) else NO_VALUE for c in shown]
            rows.append([each.strategy, what, format_size(sum(held.values())), *parts])
    head = ["strategy", "", "peak", *(CATEGORY_LABELS[c] for c in shown)]
    return html_table(head, rows, "Measured and predicted bytes by category at the peak", (0, 1))


def _measured_range(each: ForecastDifference) -> str:
    low, high = format_size(each.measured.low), format_size(each.measured.high)
    return high if low == high else f"{low} to {high}"


def _planned_volume(each: ForecastDifference) -> str:
    size = each.planned_bytes_sent
    if each.same_volume:
        return "equal" if size else "nothing"
    return format_size(size) if size else NO_VALUE


def _planned_parts(page: ComparisonPageData, forecast: Forecast) -> Iterator[str]:
    """Yield what is shown where nothing was measured."""
    reason = page.comparison.unwatched
    yield paragraph(f"There is nothing to compare with: {reason}." if reason else "No memory was measured here.")
    planned = [(strategy, strategy.peak) for strategy in forecast.strategies if strategy.phases]
    rows = [
        [strategy.strategy, format_size(peak.peak), peak.name, _volume_text(strategy)] for strategy, peak in planned
    ]
    if rows:
        yield html_table(
            ["strategy", "predicted", "in", "sent, predicted"], rows, "Predicted peak and bytes sent", (0, 2)
        )


def _volume_text(strategy: StrategyForecast) -> str:
    size = sum(size for kinds in strategy.sent.values() for size in kinds.values())
    return format_size(size) if size else NO_VALUE


def _sentences(forecast: Forecast, pairs: Sequence[ForecastDifference]) -> Iterator[str]:
    """Yield what a reader should know of the numbers."""
    yield from (f"{sentence}." for sentence in describe_refusals(forecast))
    for each in pairs:
        if each.same_volume is False:
            parts = ", ".join(f"{name} {a:,} bytes for {b:,}" for name, a, b in each.differing_volumes())
            yield f"{each.strategy} sends something else than predicted: {parts}."
        if each.same_volume is None:
            missing = "recorded" if each.measured.sent is None else "planned yet"
            yield f"{each.strategy}: what it sends was not {missing}."
    yield from (f"{note[:1].upper()}{note[1:]}." for note in forecast.notes)
    if any(strategy.phases for strategy in forecast.strategies):
        yield f"Planned after all strategies had ended, in {format_duration(forecast.seconds)} of CPU time."


def forecast_worlds_section(page: ComparisonPageData) -> str:
    """Return the section on predicted peaks by number of ranks, and on what would have to change to fit, or ""."""
    forecast = page.comparison.forecast
    if forecast is None or not (lines := forecast_lines(forecast)):
        return ""
    shared = [f"{', '.join(line.strategies)}" for line in lines if len(line.strategies) > 2]
    return html_section(
        "planned-worlds",
        f"Predicted peak on 1 to {max(ranks for line in lines for ranks in line.peaks):,} ranks",
        paragraph(
            "Peak of the fullest rank. Strategies that are within 1 % of each other on every number of ranks share a "
            "line. A circle is a strategy of one process."
        ),
        html_figure(lambda width: draw_peaks_by_ranks(forecast, width), _worlds_table(forecast)),
        bullet_list(
            [
                *(f"One line: {names}." for names in shared),
                _describe_batch(forecast),
                *_describe_limit(forecast),
                *_missing_worlds(forecast),
            ]
        ),
        *_what_would_fit(forecast),
    )


def _worlds_table(forecast: Forecast) -> str:
    numbers = sorted({world.ranks for strategy in forecast.strategies for world in strategy.worlds})
    rows: list[list[str]] = []
    for strategy in forecast.strategies:
        peaks = {world.ranks: format_size(world.peak or 0) for world in strategy.planned_worlds}
        if peaks:
            rows.append([strategy.strategy, *(peaks.get(ranks, NO_VALUE) for ranks in numbers)])
    return html_table(["strategy", *(count_of(n, "rank") for n in numbers)], rows, "Predicted peak by number of ranks")


def _describe_batch(forecast: Forecast) -> str:
    kept = f"The total batch of {count_of(forecast.samples, forecast.unit[:-1])} is kept"
    if not (other := ranks_with_other_batch(forecast)):
        return f"{kept} on every number of ranks."
    return (
        f"{kept} where it can be divided. It cannot on {_span(other)}: there each rank keeps its share of "
        f"{count_of(forecast.share, 'sample')}, and the total grows with the ranks."
    )


def _span(numbers: Sequence[int]) -> str:
    return count_of(numbers[0], "rank") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]:,} ranks"


def _describe_limit(forecast: Forecast) -> Iterator[str]:
    if forecast.memory is None or forecast.limit is None:
        yield "The memory of the device is not known: batch.memory draws its line."
        return
    free = f"{format_size(forecast.memory)} less {forecast.headroom * 100:g} %"
    if forecast.memory_from == "machine":
        yield (
            f"The dashed line is all memory of this machine, {free}, which the ranks on it share. batch.memory says "
            "what one rank may use, such as 80GiB, and draws the line there."
        )
    else:
        whose = "what batch.memory gives a rank" if forecast.memory_from == "batch.memory" else "the memory of the GPU"
        yield f"The dashed line is {whose}, {free}."
    yield from _describe_fits(forecast)


def _describe_fits(forecast: Forecast) -> Iterator[str]:
    """Yield on how many ranks strategies fit, those with the same answer together."""
    strategies: dict[str, list[str]] = {}
    planned = [strategy for strategy in forecast.strategies if strategy.planned_worlds]
    for strategy in sorted(planned, key=lambda strategy: -sum(map(forecast.fits, strategy.planned_worlds))):
        strategies.setdefault(_where_it_fits(forecast, strategy), []).append(strategy.strategy)
    if list(strategies) == [_EVERYWHERE]:
        yield f"Every strategy fits below it {_EVERYWHERE}."
        return
    for where, names in strategies.items():
        yield f"Below it {where}: {', '.join(names)}."


_EVERYWHERE: Final = "on every number of ranks"


def _where_it_fits(forecast: Forecast, strategy: StrategyForecast) -> str:
    """Return on which numbers of ranks a strategy fits, in words."""
    planned = strategy.planned_worlds
    fits = [forecast.fits(world) for world in planned]
    ranks = [world.ranks for world in planned]
    if all(fits) or not any(fits):
        return _EVERYWHERE if all(fits) else "on no number of ranks"
    first, last = fits.index(True), len(fits) - 1 - fits[::-1].index(True)
    if all(fits[first : last + 1]):
        if last == len(fits) - 1:
            return f"from {count_of(ranks[first], 'rank')} on"
        return f"on {_span(ranks[first : last + 1])} only"
    fitting = [str(n) for n, fit in zip(ranks, fits, strict=True) if fit]
    return f"on {', '.join(fitting[:-1])} and {fitting[-1]} ranks only"


def _missing_worlds(forecast: Forecast) -> Iterator[str]:
    for strategy in forecast.strategies:
        missing = [world for world in strategy.worlds if world.refusal]
        if strategy.phases and missing:
            numbers = ", ".join(str(world.ranks) for world in missing)
            yield f"{strategy.strategy} has no point on {numbers} rank{'s' * (numbers != '1')}: {missing[0].refusal}."


def _what_would_fit(forecast: Forecast) -> Iterator[str]:
    """Yield a list of what would have to change for strategies that do not fit in the compared world."""
    short = [strategy for strategy in forecast.strategies if strategy.ways]
    if not short or forecast.limit is None:
        return
    yield "<h3>What would have to change to fit</h3>"
    yield paragraph(f"In the compared world these strategies need more than {format_size(forecast.limit)} a rank:")
    yield bullet_list(
        f"{strategy.strategy}, {format_size(_compared_peak(forecast, strategy))}: {'; '.join(strategy.ways)}."
        for strategy in short
    )


def _compared_peak(forecast: Forecast, strategy: StrategyForecast) -> int:
    """Return the peak that was held against the limit."""
    here = {world.ranks: world.peak or 0 for world in strategy.planned_worlds}
    return here.get(forecast.ranks) or next(iter(here.values()))
