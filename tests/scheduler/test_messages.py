"""The wire: what is encoded comes back equal, and nothing else comes back at all."""

from __future__ import annotations

import subprocess
import sys

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import messages as m

SUBMIT = m.Submit(
    client_id=b"x" * 16,
    request_id=7,
    label="a label",
    params=m.Params(loops=8, max_tokens=5, logit_bias=((1, 2.0),), init_seed=None),
    sequences=(m.SequenceSpec(m.Tokens([1, 2, 2**32 - 1]), 2**63 + 5),),
)
EVENTS = m.Events(
    epoch=2**63,
    events=(
        m.TokenEvent(
            1,
            0,
            3,
            m.Tokens([5]),
            (m.TokenLogprob(-1.5, m.Tokens([1]), (-2.0,)),),
            (None, m.TokenLogprob(-1.0)),
            stats=m.FinishStats(1, 2),
        ),
    ),
)
BEAT = m.WorkerBeat(b"w" * 16, "0", 3, "ready", series={"rows": 2.0})


@pytest.mark.parametrize("message", [SUBMIT, EVENTS, BEAT])
def test_every_field_comes_back(message: object) -> None:
    assert m.decode(m.encode(message), (type(message),)) == message


def test_appended_fields_are_ignored_and_missing_defaults_filled() -> None:
    wire = msgpack.unpackb(m.encode(SUBMIT))
    assert m.decode(msgpack.packb([*wire, "from the future"]), m.FROM_CLIENT) == SUBMIT
    assert m.decode(msgpack.packb(wire[:7]), m.FROM_CLIENT) == SUBMIT


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (m.encode(SUBMIT)[:-3], "msgpack"),
        (msgpack.packb({"a": 1}), "not an array"),
        (msgpack.packb([2, 2]), "version"),
        (msgpack.packb([1, 999]), "tag"),
        (msgpack.packb([1, [2]]), "tag"),
        (msgpack.packb([1, 2, b"x" * 16]), "fields"),
        (msgpack.packb([1, 4, b"x" * 16, "seven"]), "expected int"),
        (msgpack.packb([1, 4, b"x" * 16, True]), "expected int"),
    ],
)
def test_what_is_no_message_is_refused(frame: bytes, why: str) -> None:
    with pytest.raises(m.BadMessage, match=why):
        m.decode(frame, m.FROM_CLIENT)


def test_a_type_from_the_wrong_side_is_refused() -> None:
    with pytest.raises(m.BadMessage, match="not accepted"):
        m.decode(m.encode(SUBMIT), m.FROM_WORKER)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
                    | st.binary(max_size=20) | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=8), max_leaves=30),
       st.sampled_from([1, 2, 3, 4, 5, 6, 7, 40, 41, 42]))  # fmt: skip
def test_arbitrary_fields_never_raise_anything_else(body: object, tag: int) -> None:
    frame = msgpack.packb([m.VERSION, tag, *(body if isinstance(body, list) else [body])])
    try:
        m.decode(frame, m.FROM_CLIENT + m.FROM_WORKER)
    except m.BadMessage:
        pass


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(frame: bytes) -> None:
    try:
        m.decode(frame, m.FROM_CLIENT)
    except m.BadMessage:
        pass


@pytest.mark.parametrize("module", ["messages", "codec", "config", "transport", "client"])
def test_the_shared_modules_stay_light(module: str) -> None:
    code = (
        f"import sys, scheduler.{module}; "
        "print([n for n in ('torch', 'numba', 'falcon', 'numpy', 'gpu_worker', 'frontend') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
