"""A complaint is made once, also when the error it quotes has another duration in it each time."""

from __future__ import annotations

from pathlib import Path

from stretto.watch.metrics import Metrics, read
from stretto.weights.complaints import Complaints


def test_said_once_and_again_when_it_is_another_one_or_was_settled(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m", "follower") as metrics:
        complaints = Complaints(metrics)
        complaints.say("store", "version 7: error in 73.5µs, after 2 retries")
        complaints.say("store", "version 7: error in 1.2s, after 2 retries")
        complaints.say("store", "version 8: error in 1.2s, after 2 retries")
        complaints.settled("store")
        complaints.say("store", "version 8: error in 3ms, after 2 retries")
        complaints.say("engine", "nobody there", patient=True)  # everything is still starting
    said = [line["text"] for line in read(tmp_path / "m") if line["kind"] == "event"]
    assert [text[:9] for text in said] == ["version 7", "version 8", "version 8"]
