"""The report: bounds that bound, sizes that are the publisher's, a synthetic step that is what it says."""

from pathlib import Path

import numpy as np
import pytest

from stretto.weights.codec_report import measure, synthetic_step, table, to_bf16
from stretto.weights.publisher import Publisher
from stretto.weights.store import Store

MASTERS = {
    f"layers.{layer}.experts.{expert}.weight": np.random.default_rng(layer * 9 + expert)
    .normal(0, 0.02, (64, 128))
    .astype(np.float32)
    for layer in range(2)
    for expert in range(8)
}


@pytest.mark.parametrize(("lr", "least", "most"), [(1e-6, 0.007, 0.015), (6e-4, 0.6, 0.9)])
def test_the_learning_rate_sets_the_share_that_changes(lr: float, least: float, most: float) -> None:
    every, kind = measure(*synthetic_step(MASTERS, lr, seed=0))
    assert (every.name, kind.name) == ("all", "layers.*.experts.*.weight")
    assert least < every.changed < most
    assert every.bytes_full == sum(array.size * 2 for array in MASTERS.values())
    assert every.bytes_given_exponent < every.bytes_order0 < every.bytes_full
    assert every.bytes_given_exponent < every.bytes_delta
    assert f"{every.changed:.2%}" in table([every])


def test_all_is_what_the_publisher_sends(tmp_path: Path) -> None:
    old, new = synthetic_step(MASTERS, 1e-5, seed=0)
    store = Store(tmp_path)
    publisher = Publisher(store, "run-0", {})
    publisher.publish(0, old)
    publisher.publish(1, new)
    sent = sum(len(store.get(key)) for key in store.list() if "/deltas/" in key)
    assert sent == measure(old, new)[0].bytes_delta


def test_bf16_masters_get_a_place_in_their_cell() -> None:
    """The largest and the smallest stay what they are without a step, zeros stay zeros."""
    bf16 = np.array([0, 0x8000, 1, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F], np.uint16).repeat(500)
    old, new = synthetic_step({"w": bf16}, 0.0, seed=3)
    for side in (old["w"], new["w"]):
        assert np.array_equal(side[1000:], bf16[1000:])
        assert set(side[:1000]) <= {0, 0x8000}


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    raw = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], np.uint32)
    assert to_bf16(raw.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]


def test_names_must_agree() -> None:
    with pytest.raises(ValueError, match="only one of the versions has tensor b"):
        measure({"a": np.zeros(1, np.uint16)}, {"a": np.zeros(1, np.uint16), "b": np.zeros(1, np.uint16)})
