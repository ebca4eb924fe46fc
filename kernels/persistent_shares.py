"""Which tiles of each product a block of the persistent kernel owns."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.fragments import RANKS, ProductShape

MOST_QKV = 4  # tiles of qkv that a block has at most: no warp gets more pieces than the rings hold


def share_tiles(
    products: Sequence[ProductShape], num_blocks: int
) -> list[list[tuple[int, int, int]]]:
    """For each block and each of qkv, o, gate_up, down, head: its first tile, how many, and the half of its warps that begins.

    All but qkv are spread evenly; qkv so that the bytes of a layer are even over the blocks; the halves
    so that they are even over the warps of a block.
    """
    used = [-(-p.n // 16) for p in products]
    size = [p.tile_bytes / products[0].tile_bytes for p in products]

    def even(total: int) -> list[int]:
        edges = [i * total // num_blocks for i in range(num_blocks + 1)]
        return [b - a for a, b in zip(edges, edges[1:], strict=False)]

    counts = [even(n) for n in used]
    taken = [sum(counts[p][b] * size[p] for p in (1, 2, 3)) for b in range(num_blocks)]
    free = used[0]
    most = (free + sum(taken)) / num_blocks
    # pieces of down that a block's warps still work on leave less of their rings to qkv, which comes next
    cap = max(MOST_QKV, -(-free // num_blocks))
    caps = [cap // 2 if n else cap for n in counts[3]]
    if sum(caps) < free:
        caps = [cap] * num_blocks
    while sum(max(0, min(c, int(most - t))) for c, t in zip(caps, taken, strict=True)) < free:
        most += 1 / 8
    room = [max(0, min(c, int(most - t))) for c, t in zip(caps, taken, strict=True)]
    for _ in range(sum(room) - free):
        room[max((b for b in range(num_blocks) if room[b]), key=lambda b: taken[b] + room[b])] -= 1
    counts[0] = room
    firsts = [0] * len(products)
    shares = []
    for b in range(num_blocks):
        share, ahead = [], 0
        for p, product in enumerate(products):
            # the half that has done less begins
            half = 1 if ahead > 0 else 0
            count = counts[p][b]
            share.append((firsts[p], count, half))
            firsts[p] += count
            if count % 2 and RANKS * product.sub_slices == RANKS:
                ahead += -1 if half else 1
        shares.append(share)
    return shares


def seats(shares: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
    """In which order the blocks take items of attention: those with the fewest tiles of qkv, which comes before it, first."""
    order = sorted(range(len(shares)), key=lambda block: (shares[block][0][1], block))
    places = [0] * len(shares)
    for place, block in enumerate(order):
        places[block] = place
    return places
