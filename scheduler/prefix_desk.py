"""Prefixes by name: answers `PrefixCommand`s and has registered entries built, again after the loss of their worker.

A build is an internal request of one sequence with max_tokens 0 whose `Run` stores the entry; it passes through queue and workers
like any other, but not through the books.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.messages import (
    BLOCK_SIZE,
    Params,
    PrefixCommand,
    PrefixInfo,
    PrefixReply,
    SequenceSpec,
    Tokens,
)
from scheduler.prefix_pool import Entry, PrefixPool, floor_to_block
from scheduler.request import Request
from scheduler.validate import Refusal, check_limits
from scheduler.workers import Workers

REBUILD_S = 5.0  # a worker short of blocks may drop what was just built: not at once again

_Asker = tuple[bytes, int]  # client id, query id


class PrefixDesk:
    """The counter where prefixes are asked for.

    Args:
        build: starts an internal request for (params, sequence, salt, label) and returns it.
        cancel: ends such a request.
        reply: sends a message to a client.
    """

    def __init__(
        self,
        pool: PrefixPool,
        workers: Workers,
        build: Callable[[Params, SequenceSpec, str, str], Request],
        cancel: Callable[[Request], None],
        reply: Callable[[bytes, object], None],
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._build = build
        self._cancel = cancel
        self._reply = reply
        self._builds: dict[bytes, Request] = {}  # by prefix id
        self._build_after: dict[bytes, float] = {}
        self._askers: dict[bytes, list[_Asker]] = {}  # who waits for an entry to be held

    def command(self, command: PrefixCommand, now: float) -> None:
        """Answer a command now, or a register once a worker holds the entry."""
        code, message, entry = {
            "register": self._register, "delete": self._delete, "list": self._list,
        }[command.op](command, now)  # fmt: skip
        if entry is not None and not entry.holders:
            self._askers.setdefault(entry.prefix_id, []).append(
                (command.client_id, command.query_id)
            )
            return
        entries = () if code else self._infos(command.salt, now)
        if command.op != "list":
            entries = tuple(e for e in entries if e.name == command.name)
        self._reply(command.client_id, PrefixReply(command.query_id, code, message, entries))

    def tick(self, now: float) -> None:
        """Answer those whose entry is held by now, and build the registered entries that no worker holds."""
        for prefix_id, askers in list(self._askers.items()):
            entry = self._pool.get(prefix_id)
            if entry is None or entry.holders:
                del self._askers[prefix_id]
                for asker in askers:
                    self._answer(asker, entry, now)
        if self._workers.ready:
            for entry in self._pool.homeless():
                is_due = now >= self._build_after.get(entry.prefix_id, now)
                if entry.prefix_id not in self._builds and is_due:
                    self._start(entry, now)

    def _start(self, entry: Entry, now: float) -> None:
        self._build_after[entry.prefix_id] = now + REBUILD_S
        spec = SequenceSpec(entry.tokens, 0)
        params = Params(loops=entry.key.loops, max_tokens=0)
        name = f"prefix {entry.key.name}"
        self._builds[entry.prefix_id] = self._build(params, spec, entry.key.salt, name)

    def ended(self, request: Request) -> None:
        """A build has ended. One in error ends the entry: whoever asked for it hears why."""
        prefix_id = next(name for name, build in self._builds.items() if build is request)
        del self._builds[prefix_id]
        sequence = request.sequences[0]
        entry = self._pool.get(prefix_id)
        if entry is None or entry.holders:
            return
        # A worker reports what it stored before, or in the same step as, the end of the run that stored it.
        code = (
            "engine_down" if sequence.error_code in ("engine_down", "worker_lost") else "pool_full"
        )
        reason = sequence.error_message or "the engine had no room to keep it"
        self._pool.delete(entry.key.salt, entry.key.name)
        self._build_after.pop(prefix_id, None)
        for client_id, query_id in self._askers.pop(prefix_id, []):
            self._reply(client_id, PrefixReply(query_id, code, reason))

    def _register(self, command: PrefixCommand, now: float) -> tuple[str, str, Entry | None]:
        limits = self._workers.limits
        if limits is None:
            return "engine_down", "no engine is ready", None
        if not self._pool.is_on:
            return "pool_full", "the prefix pool is switched off", None
        if not command.name:
            return "invalid_request", "'name' is required", None
        tokens = Tokens(command.tokens[: floor_to_block(len(command.tokens))])
        loops = command.loops or limits.loops_default
        if not tokens:
            return "invalid_request", f"'prompt' must have at least {BLOCK_SIZE} tokens", None
        try:
            check_limits(Params(loops=loops, max_tokens=0), [SequenceSpec(tokens, 0)], limits)
        except Refusal as ex:
            return "invalid_request", ex.message, None
        if loops < 1:
            return "invalid_request", "'loops' must be 1 or more", None
        code, entry = self._pool.register(command.salt, command.name, tokens, loops, now)
        message = {
            "": "", "exists": "another prefix has this name", "pool_full": "every place in the prefix pool is taken",
        }[code]  # fmt: skip
        return code, message, entry

    def _delete(self, command: PrefixCommand, now: float) -> tuple[str, str, Entry | None]:
        entry = self._pool.find(command.salt, command.name)
        if entry is None:
            return "not_found", "no prefix has this name", None
        self._pool.delete(command.salt, command.name)
        self._build_after.pop(entry.prefix_id, None)
        build = self._builds.get(entry.prefix_id)
        if build is not None:
            self._cancel(build)
        return "", "", None

    def _list(self, command: PrefixCommand, now: float) -> tuple[str, str, Entry | None]:
        return "", "", None

    def _answer(self, asker: _Asker, entry: Entry | None, now: float) -> None:
        client_id, query_id = asker
        if entry is None:
            self._reply(
                client_id, PrefixReply(query_id, "not_found", "deleted before it was built")
            )
            return
        infos = self._infos(entry.key.salt, now)
        named = tuple(i for i in infos if i.name == entry.key.name)
        self._reply(client_id, PrefixReply(query_id, "", "", named))

    def _infos(self, salt: str, now: float) -> tuple[PrefixInfo, ...]:
        names = {w.worker_id: w.name for w in self._workers.ready.values()}
        return self._pool.infos(salt, now, names)
