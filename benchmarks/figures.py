"""What a measurement results in, as JSON, as a table and as a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["Figure", "plot", "table"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value beside a reference measured in the same run, by turns."""

    name: str
    """What was measured."""

    path: str
    """One of targets.PATHS."""

    case: str
    """Which size, percentile or load."""

    value: float
    """The median of the rounds, in `unit`."""

    unit: str

    reference: float
    """The reference's median, in `unit`."""

    reference_name: str
    """What the reference does."""

    size: int = 0
    """Bytes of one transfer, where `case` is a size."""

    spread: tuple[float, float] = (0.0, 0.0)
    """The lowest and the highest round."""

    least_ratio: float | None = None
    """What `ratio` should be at least, where that has been said."""

    most: float | None = None
    """What `value` should be at most, where that has been said."""

    @classmethod
    def of(
        cls, name: str, path: str, case: str, unit: str, values: Sequence[float],
        references: Sequence[float], reference_name: str, size: int = 0, *,
        least_ratio: float | None = None, most: float | None = None,
    ) -> Figure:  # fmt: skip
        """From the values of all rounds."""
        return cls(
            name,
            path,
            case,
            statistics.median(values),
            unit,
            statistics.median(references),
            reference_name,
            size,
            (min(values), max(values)),
            least_ratio,
            most,
        )

    @property
    def ratio(self) -> float:
        """The value as a multiple of the reference."""
        return self.value / self.reference if self.reference else float("nan")

    @property
    def goal_met(self) -> bool | None:
        """Whether it is as good as it should be; None where nothing has been said."""
        if self.least_ratio is not None:
            return self.ratio >= self.least_ratio
        if self.most is not None:
            return self.value <= self.most
        return None

    @property
    def goal(self) -> str:
        """What it should be and whether it is, for a human."""
        if self.least_ratio is not None:
            words = f"ratio {self.least_ratio:g} or more"
        elif self.most is not None:
            words = f"{self.most:g} {self.unit} or less"
        else:
            return ""
        return f"{words}: {'met' if self.goal_met else 'MISSED'}"

    def as_json(self) -> dict[str, Any]:
        """All of it, for a machine."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "goal_met": self.goal_met}


def table(figures: Sequence[Figure]) -> str:
    """For a human: a line for each figure, those of one name together."""
    header = ("", "path", "case", "value", "lowest..highest", "reference", "ratio", "to", "goal")
    rows = [header]
    for figure in figures:
        low, high = figure.spread
        rows.append(
            (
                figure.name,
                figure.path,
                figure.case,
                f"{figure.value:.4g} {figure.unit}",
                f"{low:.3g}..{high:.3g}",
                f"{figure.reference:.4g}",
                f"{figure.ratio:.3g}",
                figure.reference_name,
                figure.goal,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    previous = ""
    for row in rows:
        shown = ("", *row[1:]) if row[0] == previous else row
        previous = row[0]
        lines.append("  ".join(map(str.ljust, shown, widths)).rstrip())
    return "\n".join(lines)


def plot(figures: Sequence[Figure], path: str) -> None:
    """Throughput by size, ours and the references', as a picture. Needs matplotlib."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(9, 5), layout="constrained")
    axes = picture.subplots()
    throughput = [figure for figure in figures if figure.name == "throughput" and figure.size]
    for kind in dict.fromkeys(figure.path for figure in throughput):
        points = sorted((one for one in throughput if one.path == kind), key=lambda one: one.size)
        sizes = [one.size for one in points]
        (line,) = axes.plot(sizes, [one.value for one in points], "o-", label=kind)
        axes.fill_between(
            sizes,
            [one.spread[0] for one in points],
            [one.spread[1] for one in points],
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
        axes.plot(
            sizes,
            [one.reference for one in points],
            "--",
            color=line.get_color(),
            label=points[0].reference_name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    names = {one.size: one.case for one in throughput}
    axes.set_xticks(list(names), list(names.values()))
    axes.set_xlabel("bytes of one write")
    axes.set_ylabel("GiB/s")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    picture.savefig(path)
