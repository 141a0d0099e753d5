"""The report of a mid-training run: each step once, phases one after the other, and a page at any state."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from stretto.watch import midtraining
from stretto.watch.metrics import Metrics, read


def run(folder: Path, steps: int = 30, measured: bool = True) -> Path:
    with Metrics(folder / "metrics.jsonl", "midtrain") as log:
        for phase in ("bulk", "long <1>"):
            for step in range(1, steps + 1):
                values = {"loss": 5.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "busiest": 1.5, "tokens_per_s": 900.0}
                log.log("midtrain", phase=phase, step=step, seen=step * 100, **values)
                if measured and step % 10 == 0:
                    log.log("bits", phase=phase, step=step, python=2.0 - step / 100, go=2.5, all=2.2)
                    one = {"match": 0.25, "ci95": [0.1, 0.4], "spans": 40}
                    log.log("fim", phase=phase, step=step, python=one, go=one, all=one)
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def labels(page: str) -> set[str | None]:
    tags = Tags()
    tags.feed(page)
    return {attributes.get("aria-label") for tag, attributes in tags.seen if tag == "svg"}


def test_a_page_shows_every_curve_that_was_measured_and_no_other(tmp_path: Path) -> None:
    page = midtraining.write(run(tmp_path)).read_text()
    assert labels(page) == {
        "loss over tokens",
        "bits per byte over tokens",
        "exact matches over tokens",
        "lr over tokens",
        "load of the busiest expert",
        "grad_norm over tokens",
        "tokens_per_s over tokens",
    }
    assert "long &lt;1&gt;" in page and "long <1>" not in page and "python, 2 k tokens: 1.800 bits per byte" in page
    bare = midtraining.write(run(tmp_path / "bare", steps=1, measured=False)).read_text()
    assert "bits per byte over tokens" not in labels(bare) and "loss over tokens" in labels(bare)


def test_phases_follow_each_other_and_a_step_repeated_after_a_restart_counts_once(tmp_path: Path) -> None:
    lines = read(run(tmp_path) / "metrics.jsonl")
    again = [{**line, "loss": 9.0} for line in lines if line["kind"] == "midtrain" and line["step"] > 28]
    found = midtraining.ordered([*lines, *again])
    assert len(found.steps) == 60 and [line["x"] for line in found.steps] == [100.0 * n for n in range(1, 61)]
    assert found.steps[-1]["loss"] == 9.0 and found.phases == [("bulk", 0.0), ("long <1>", 3000.0)]
    assert [line["x"] for line in found.bits] == [1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0]


def test_another_folder_is_no_mid_training_run(tmp_path: Path) -> None:
    assert not midtraining.is_run(tmp_path)
    run(tmp_path)
    assert midtraining.is_run(tmp_path)
    (tmp_path / "config.toml").write_text("")
    assert not midtraining.is_run(tmp_path), "an RL run"


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (35_400, "35.4 k"), (1.2e6, "1.2 M"), (3e9, "3 G")])
def test_tokens_are_written_short(value: float, text: str) -> None:
    assert midtraining.tokens(value) == text
