"""Which prompt prefixes the workers hold, and which of them to reuse, store, pin and drop.

A trie over chunks of 64 tokens, one root per (salt, KV mode, initial-state seed), with the entries that pass through each node, so
that the longest common part counts even of an entry that goes on differently. What is held is what workers report: an
entry comes with `held` and goes with `dropped` or with its last worker; only registered (named) entries outlive that, to be rebuilt.
Workers own the K/V itself and evict for room; this pool decides what is worth keeping. Touches no sockets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from scheduler.messages import (
    BLOCK_SIZE,
    HeldPrefix,
    Params,
    PrefixInfo,
    PrefixKey,
    Tokens,
)
from scheduler.validate import PREFIX_ID_BYTES

UNPINNED_PER_PINNED = 16  # unpinned entries known, as a multiple of the pinned capacity
MAX_MEMORY = 4096  # ids remembered of what is to be pinned, or was deleted

_Group = tuple[str, str, int | None]


def prefix_id(key: PrefixKey, tokens: Tokens) -> bytes:
    """16 bytes that name an entry, equal after a scheduler's restart."""
    fields = (key.salt, key.kv_cache_mode, key.init_seed, key.cache_window, key.loops, key.name)
    digest = blake2b(repr(fields).encode("utf-8", "surrogatepass"), digest_size=PREFIX_ID_BYTES)
    digest.update(array("I", tokens).tobytes())
    return digest.digest()


def floor_to_block(num_tokens: int) -> int:
    return num_tokens - num_tokens % BLOCK_SIZE


@dataclass(slots=True, eq=False)
class Entry:
    """`holders` maps a worker to what it reported of its copy."""

    prefix_id: bytes
    key: PrefixKey
    tokens: Tokens
    used_at: float
    is_pinned: bool = False
    hits: int = 0
    holders: dict[bytes, HeldPrefix] = field(default_factory=dict)

    def as_store(self) -> HeldPrefix:
        """What a `Run` carries to have it stored."""
        return HeldPrefix(self.prefix_id, self.key, self.tokens, 0, 0)


@dataclass(slots=True, eq=False)
class _Node:
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    entries: dict[bytes, Entry] = field(default_factory=dict)  # those that pass through or end here


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens of `entry` can be used for a prompt. `is_whole`: the prompt begins with the entire entry, even if it is
    no longer than that, so that its last block must be run.
    """

    entry: Entry
    length: int
    is_whole: bool


class PrefixPool:
    """`capacity` entries are pinned at most; with 0 nothing is stored or reused.

    `evicted` collects (worker id, prefix id) that workers must be told to drop; the caller empties it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[bytes, Entry] = {}  # least recently used first
        self._named: dict[tuple[str, str], Entry] = {}  # by (salt, name)
        self._roots: dict[_Group, _Node] = {}
        self._to_pin: set[bytes] = set()  # asked to be stored, and worth a pin once held
        self._deleted: set[bytes] = (
            set()
        )  # dropped by name; a worker that was away may still list one
        self.has_coda = False
        self.default_mode = ""
        self.evicted: list[tuple[bytes, bytes]] = []

    @property
    def is_on(self) -> bool:
        return self._capacity > 0

    # ------------------------------------------------------------------------------------------------ lookup

    def matches(self, prompt: Tokens, params: Params, salt: str) -> dict[bytes, Match]:
        """The longest usable match of each worker that has one. At least one token of the prompt is always left to run."""
        found: dict[bytes, Match] = {}
        if not self.is_on or params.prompt_logprobs >= 0:  # those need every prompt token run
            return found
        path = self._path(prompt[: floor_to_block(len(prompt) - 1)], params, salt)
        for depth in range(len(path), 0, -1):
            length = depth * BLOCK_SIZE
            for entry in path[depth - 1].entries.values():
                if not entry.holders or not self._serves(entry.key, params, length):
                    continue
                is_whole = prompt[: len(entry.tokens)] == entry.tokens
                for worker_id in entry.holders:
                    best = found.get(worker_id)
                    if best is None or (is_whole and best.length == length and not best.is_whole):
                        found[worker_id] = Match(entry, length, is_whole)
        return found

    def _path(self, tokens: tuple[int, ...], params: Params, salt: str) -> list[_Node]:
        node = self._roots.get(self._group(salt, params.kv_cache_mode, params.init_seed))
        path = []
        for start in range(0, len(tokens), BLOCK_SIZE):
            node = node.children.get(tokens[start : start + BLOCK_SIZE]) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _serves(self, key: PrefixKey, params: Params, length: int) -> bool:
        """K/V of loop t depends on loops 1..t alone, so a deeper entry serves shallower requests, unless a coda's K/V
        (which depends on the last loop) belongs to it. A window that is not longer than the prefix changes its K/V."""
        loops_fit = params.loops == key.loops if self.has_coda else params.loops <= key.loops
        return loops_fit and _window(key.cache_window, length) == _window(
            params.cache_window, length
        )

    def _group(self, salt: str, mode: str, init_seed: int | None) -> _Group:
        return salt, mode or self.default_mode, init_seed

    # ------------------------------------------------------------------------------------------------ what to store

    def plan_store(
        self, prompt: Tokens, params: Params, salt: str, worker_id: bytes, match: Match | None
    ) -> HeldPrefix | None:
        """What `worker_id` shall keep of this prompt once it is prefilled; None if nothing new.

        First the longest registered entry that this worker lacks, then the part shared with an entry that goes on differently (a second
        sight: it will be pinned), else the whole prompt.
        """
        full = floor_to_block(len(prompt))
        if not self.is_on or full == 0:
            return None
        for entry in self._named_on_path(prompt[:full], params, salt):
            if worker_id not in entry.holders:
                return entry.as_store()
        if match is not None and not match.is_whole:
            store = self._unnamed(prompt[: match.length], params, salt)
            known = self._entries.get(store.prefix_id)
            if known is None or worker_id not in known.holders:
                self._to_pin = {store.prefix_id, *list(self._to_pin)[:MAX_MEMORY]}
                return store
            self._pin(known)
        store = self._unnamed(prompt[:full], params, salt)
        known = self._entries.get(store.prefix_id)
        return None if known is not None and worker_id in known.holders else store

    def _unnamed(self, tokens: tuple[int, ...], params: Params, salt: str) -> HeldPrefix:
        key = PrefixKey(
            salt=salt,
            kv_cache_mode=params.kv_cache_mode or self.default_mode,
            init_seed=params.init_seed,
            cache_window=_window(params.cache_window, len(tokens)),
            loops=params.loops,
        )
        return HeldPrefix(prefix_id(key, Tokens(tokens)), key, Tokens(tokens), 0, 0)

    def _named_on_path(self, tokens: tuple[int, ...], params: Params, salt: str) -> Iterator[Entry]:
        path = self._path(tokens, params, salt)
        for depth, node in reversed(list(enumerate(path, 1))):
            for entry in node.entries.values():
                is_whole = len(entry.tokens) == depth * BLOCK_SIZE
                if entry.key.name and is_whole and entry.key.loops == params.loops:
                    if self._serves(entry.key, params, len(entry.tokens)):
                        yield entry

    # ------------------------------------------------------------------------------------------------ what happens

    def use(self, match: Match, now: float) -> None:
        """A sequence was sent off with this match: the second sight of an entry pins it."""
        self._touch(match.entry, now)
        if match.is_whole:
            self._pin(match.entry)

    def hit(self, prefix_id_: bytes) -> None:
        """A worker said that it did begin from this entry."""
        entry = self._entries.get(prefix_id_)
        if entry is not None:
            entry.hits += 1

    def held(self, worker_id: bytes, held: HeldPrefix, now: float) -> None:
        """A worker reports an entry that it holds. It is told to drop one that is not wanted, or that is not what its id says."""
        is_wanted = self.is_on and held.prefix_id not in self._deleted
        if not is_wanted or held.prefix_id != prefix_id(held.key, held.tokens):
            self.evicted.append((worker_id, held.prefix_id))
            return
        entry = self._entries.get(held.prefix_id)
        if entry is None:
            entry = self._add(Entry(held.prefix_id, held.key, held.tokens, now))
        entry.holders[worker_id] = replace(held, tokens=entry.tokens)
        self._touch(entry, now)
        if held.key.name:
            self._named.setdefault((held.key.salt, held.key.name), entry)
            entry.is_pinned = True
        elif held.prefix_id in self._to_pin:
            self._to_pin.discard(held.prefix_id)
            self._pin(entry)
        self._evict_surplus()

    def dropped(self, worker_id: bytes, prefix_ids: Iterable[bytes]) -> None:
        """A worker has evicted these."""
        for name in prefix_ids:
            entry = self._entries.get(name)
            if entry is not None and entry.holders.pop(worker_id, None) is not None:
                self._forget_if_nowhere(entry)

    def worker_lost(self, worker_id: bytes) -> None:
        self.dropped(worker_id, list(self._entries))
        self.evicted = [pair for pair in self.evicted if pair[0] != worker_id]

    # ------------------------------------------------------------------------------------------------ by name

    def register(
        self, salt: str, name: str, tokens: Tokens, loops: int, now: float
    ) -> tuple[str, Entry | None]:
        """Register an entry under a name. Returns (code, entry): "" with the entry, which may have no holder yet, or
        `exists` (the name has other tokens or loops) or `pool_full`."""
        key = PrefixKey(salt=salt, kv_cache_mode=self.default_mode, loops=loops, name=name)
        entry = self._named.get((salt, name))
        if entry is not None:
            is_same = entry.tokens == tokens and entry.key.loops == loops
            return ("", entry) if is_same else ("exists", None)
        if len(self._named) >= self._capacity:
            return "pool_full", None
        entry = self._add(Entry(prefix_id(key, tokens), key, tokens, now, is_pinned=True))
        self._deleted.discard(entry.prefix_id)
        self._named[salt, name] = entry
        self._make_room_for_pin()
        return "", entry

    def delete(self, salt: str, name: str) -> bool:
        """Forget a registered entry and have its holders drop it."""
        entry = self._named.pop((salt, name), None)
        if entry is None:
            return False
        self._deleted = {entry.prefix_id, *list(self._deleted)[:MAX_MEMORY]}
        self._evict(entry)
        return True

    def find(self, salt: str, name: str) -> Entry | None:
        return self._named.get((salt, name))

    def get(self, prefix_id_: bytes) -> Entry | None:
        return self._entries.get(prefix_id_)

    def is_current(self, entry: Entry) -> bool:
        return self._entries.get(entry.prefix_id) is entry

    def homeless(self) -> list[Entry]:
        """Registered entries that no worker holds: to be built."""
        return [e for e in self._named.values() if not e.holders]

    def entries(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def infos(
        self, salt: str, now: float, worker_names: dict[bytes, str]
    ) -> tuple[PrefixInfo, ...]:
        """All entries of one salt, as a client may see them."""
        return tuple(
            PrefixInfo(
                name=entry.key.name,
                num_tokens=len(entry.tokens),
                loops=entry.key.loops,
                hits=entry.hits,
                workers=tuple(worker_names.get(w, w.hex()) for w in entry.holders),
                num_bytes=sum(h.num_bytes for h in entry.holders.values()),
                idle_s=max(0.0, now - entry.used_at),
                is_pinned=entry.is_pinned,
            )
            for entry in self._entries.values()
            if entry.key.salt == salt
        )

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def _add(self, entry: Entry) -> Entry:
        self._entries[entry.prefix_id] = entry
        for node in self._nodes(entry, create=True):
            node.entries[entry.prefix_id] = entry
        return entry

    def _nodes(self, entry: Entry, *, create: bool) -> list[_Node]:
        key, tokens = entry.key, entry.tokens
        group = self._group(key.salt, key.kv_cache_mode, key.init_seed)
        node = self._roots.setdefault(group, _Node()) if create else self._roots[group]
        nodes = []
        for start in range(0, len(tokens), BLOCK_SIZE):
            chunk = tokens[start : start + BLOCK_SIZE]
            node = node.children.setdefault(chunk, _Node()) if create else node.children[chunk]
            nodes.append(node)
        return nodes

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.prefix_id]
        nodes = self._nodes(entry, create=False)
        for node in nodes:
            del node.entries[entry.prefix_id]
        key, tokens = entry.key, entry.tokens
        group = self._group(key.salt, key.kv_cache_mode, key.init_seed)
        parents = [self._roots[group], *nodes]
        for depth in range(len(nodes) - 1, -1, -1):  # bare twigs go, from the tip
            if nodes[depth].entries or nodes[depth].children:
                return
            del parents[depth].children[tokens[depth * BLOCK_SIZE : (depth + 1) * BLOCK_SIZE]]
        if not self._roots[group].children:
            del self._roots[group]

    def _touch(self, entry: Entry, now: float) -> None:
        if self.is_current(entry):
            entry.used_at = now
            self._entries[entry.prefix_id] = self._entries.pop(entry.prefix_id)

    def _pin(self, entry: Entry) -> None:
        if not entry.is_pinned and self.is_current(entry):
            entry.is_pinned = True
            self._make_room_for_pin()

    def _make_room_for_pin(self) -> None:
        """Over capacity the least recently used unnamed pins are let go of; registered ones stay."""
        pinned = [e for e in self._entries.values() if e.is_pinned]
        surplus = len(pinned) - self._capacity
        for entry in [e for e in pinned if not e.key.name][: max(0, surplus)]:
            entry.is_pinned = False

    def _evict_surplus(self) -> None:
        unpinned = [e for e in self._entries.values() if not e.is_pinned]
        for entry in unpinned[: max(0, len(unpinned) - UNPINNED_PER_PINNED * self._capacity)]:
            self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        self.evicted += [(worker_id, entry.prefix_id) for worker_id in entry.holders]
        entry.holders.clear()
        self._remove(entry)

    def _forget_if_nowhere(self, entry: Entry) -> None:
        if not entry.holders and self._named.get((entry.key.salt, entry.key.name)) is not entry:
            self._remove(entry)


def _window(cache_window: int, length: int) -> int:
    """The window as far as it matters to a prefix of `length`: 0 if every token of it sees all before it."""
    return cache_window if 0 < cache_window < length else 0
