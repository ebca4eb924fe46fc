"""The table of moves, and what a request and its sequences say of themselves."""

from __future__ import annotations

import itertools

import pytest

from scheduler.messages import Params, SequenceSpec, TokenLogprob, Tokens
from scheduler.request import MOVES, IllegalMove, Request, RequestState, num_blocks, transition

S = RequestState


class Recorder:
    def __init__(self) -> None:
        self.moves: list[tuple[RequestState, RequestState]] = []

    def moved(self, request: Request, old: RequestState) -> None:
        self.moves.append((old, request.state))


def make_request(
    num_sequences: int = 1, emitted: tuple[int, ...] = (), **fields: object
) -> Request:
    request = Request(b"c" * 16, 1, "r", Params(loops=2, max_tokens=10), order=1, **fields)  # type: ignore[arg-type]
    specs = tuple(SequenceSpec(Tokens([1, 2]), i, Tokens(emitted)) for i in range(num_sequences))
    request.add_sequences(specs, itertools.count(1).__next__)
    return request


LEGAL = {
    (S.NEW, S.QUEUED), (S.NEW, S.REJECTED),
    (S.QUEUED, S.DISPATCHED), (S.QUEUED, S.COMPLETED), (S.QUEUED, S.CANCELLED), (S.QUEUED, S.ERRORED),
    (S.DISPATCHED, S.RUNNING), (S.DISPATCHED, S.QUEUED), (S.DISPATCHED, S.COMPLETED),
    (S.DISPATCHED, S.CANCELLED), (S.DISPATCHED, S.ERRORED),
    (S.RUNNING, S.QUEUED), (S.RUNNING, S.COMPLETED), (S.RUNNING, S.CANCELLED), (S.RUNNING, S.ERRORED),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
def test_only_the_moves_of_the_table_are_made(old: RequestState, new: RequestState) -> None:
    books, request = Recorder(), make_request()
    request.state = old
    if (old, new) in LEGAL:
        transition(request, new, 5.0, books)
        assert (request.state, books.moves) == (new, [(old, new)])
        assert request.stamps[new] == 5.0
    else:
        with pytest.raises(IllegalMove):
            transition(request, new, 5.0, books)
        assert (request.state, books.moves, request.stamps) == (old, [], {})


def test_every_state_but_the_ends_has_a_way_out() -> None:
    assert {state for state in S if MOVES[state]} == {state for state in S if not state.is_ended}


def test_the_first_stamp_of_a_state_stays_when_a_request_goes_around() -> None:
    books, request = Recorder(), make_request()
    for now, state in enumerate((S.QUEUED, S.DISPATCHED, S.QUEUED, S.DISPATCHED, S.RUNNING)):
        transition(request, state, float(now), books)
    assert request.stamps == {S.QUEUED: 0.0, S.DISPATCHED: 1.0, S.RUNNING: 4.0}


def test_internal_requests_are_not_in_the_books() -> None:
    books, request = Recorder(), make_request(is_internal=True)
    transition(request, S.QUEUED, 1.0, books)
    assert request.state is S.QUEUED and books.moves == []


def test_an_event_holds_what_is_new_with_its_log_probabilities() -> None:
    sequence = make_request().sequences[0]
    sequence.tokens += [5, 6, 7]
    sequence.logprobs += [TokenLogprob(-5.0), TokenLogprob(-6.0), TokenLogprob(-7.0)]
    assert sequence.publish().tokens == (5, 6, 7)
    assert sequence.publish().tokens == ()
    sequence.acknowledge(1)
    event = sequence.event(2)
    assert (event.first_index, event.tokens, event.logprobs) == (2, (7,), (TokenLogprob(-7.0),))
    assert sequence.event(1).logprobs == (TokenLogprob(-6.0), TokenLogprob(-7.0))
    assert sequence.tokens == [5, 6, 7]  # kept whole, for a replay


def test_tokens_that_a_client_brought_are_not_sent_back() -> None:
    sequence = make_request(emitted=Tokens([8, 9])).sequences[0]
    sequence.tokens.append(10)
    event = sequence.publish()
    assert (event.first_index, event.tokens) == (2, (10,))


def test_prompt_log_probabilities_come_with_the_first_token_alone() -> None:
    sequence = make_request().sequences[0]
    sequence.prompt_logprobs = (None, TokenLogprob(-1.0))
    sequence.tokens += [5, 6]
    assert len(sequence.event(0).prompt_logprobs) == 2
    assert sequence.event(1).prompt_logprobs == ()
    sequence.acknowledge(1)
    assert sequence.prompt_logprobs == ()


@pytest.mark.parametrize(
    ("reasons", "state"),
    [
        (("stop", "length"), S.COMPLETED),
        (("stop", "cancelled"), S.CANCELLED),
        (("cancelled", "error"), S.ERRORED),
    ],
)
def test_the_ends_of_the_sequences_decide_the_end_of_the_request(
    reasons: tuple[str, ...], state: RequestState
) -> None:
    request = make_request(len(reasons))
    for sequence, reason in zip(request.sequences, reasons, strict=True):
        sequence.finish_reason = reason
    assert request.end_state() is state


@pytest.mark.parametrize(
    ("positions", "loops", "extra", "blocks"),
    [(1, 1, 0, 1), (64, 2, 0, 2), (65, 2, 0, 4), (128, 3, 2, 10)],
)
def test_blocks(positions: int, loops: int, extra: int, blocks: int) -> None:
    assert num_blocks(positions, loops, extra) == blocks
