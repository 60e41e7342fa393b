"""Long answers in JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zoo_runtime.files.results import plain
from zoo_runtime.server.http import encoding
from zoo_runtime.server.http.encoding import encode_json
from zoo_runtime.server.request_error import RequestError

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, min_side=0, max_side=3), elements={"allow_nan": False,
                    "allow_infinity": False})
    | st.just(np.int64(3))
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(body=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), at_once=st.integers(1, 3))
def test_parts_add_up_to_the_json_of_the_whole(body: dict[str, Any], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_AT_ONCE", at_once)
        found = encode_json(body, "remedy")
    assert found.decode() == json.dumps(plain(body), ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("numbers", [np.zeros(2**12), [0.5] * 2**12, np.zeros((4, 2**10)), [[1, [2] * 3]] * 2**10])
def test_answer_with_too_many_numbers_is_refused(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_NUMBERS", 2**12)
    assert encode_json({"data": numbers}, "ask for less").count(b",") >= 2**12 - 1
    with pytest.raises(RequestError, match=r"has 4097 numbers, and in JSON at most 4096 .*: ask for less") as caught:
        encode_json({"data": numbers, "more": 1}, "ask for less")
    assert caught.value.status == 400


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        encode_json({"data": [[1.0, float("nan")]]})
