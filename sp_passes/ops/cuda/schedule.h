// SPDX-License-Identifier: Apache-2.0
// Who computes and who sends what in ag_gemm.cu and gemm_rs.cu. Plain C++, so that it is tested on
// a CPU too.
//
// A chunk is the rows of one rank, cut into tiles of BM rows. A push is at most UNIT bytes of this
// rank's rows on their way to one peer; pushes of a tile of rows are counted by one word there.
#pragma once

#ifdef __CUDACC_RTC__
#define HD __host__ __device__ inline
#else
#define HD inline
#endif

struct Tile {
    int chunk, row, col;
};

HD int least(int a, int b) { return a < b ? a : b; }

// Tile `t` of chunks of `rows` x `cols` tiles: `group` rows of tiles at a time, column by column,
// so that the tiles that run together share weights in L2.
HD Tile tile_of(int t, int rows, int cols, int group) {
    const int per = rows * cols, wide = group * cols, in = t % per;
    const int first = in / wide * group, high = least(rows - first, group);
    return {t / per, first + in % wide % high, in % wide / high};
}

// Whose rows an AG-GEMM multiplies as its chunk number `chunk`: own, then in order of arrival.
HD int source_of(int chunk, int rank, int size) { return (rank - chunk + size) % size; }

// Whose rows a GEMM-RS multiplies as its chunk number `chunk`: own last. The rank whose sum waits
// longest for this rank comes first.
HD int owner_of(int chunk, int rank, int size) { return (rank + size - 1 - chunk) % size; }

// Tile `t` of a GEMM-RS. `group` rows of tiles of every peer's chunk take turns with as many of the
// own chunk, one turn later: so the links are busy to the end, and the peers' parts of an own tile
// have had time to arrive.
HD Tile reduced_tile(int t, int rows, int cols, int group, int size) {
    const int peers = size - 1, turns = (rows + group - 1) / group;
    const int rest = rows - (turns - 1) * group;  // rows of the last turn
    auto in = [&](int at, int turn, int chunk) {
        const int high = turn == turns - 1 ? rest : group;
        return Tile{chunk, turn * group + at % high, at / high};
    };
    const int full = group * cols, part = rest * cols;
    const int first = turns > 1 ? full : part;  // tiles of a chunk in the first turn
    if (t < peers * first) return in(t % first, 0, t / first);
    t -= peers * first;
    const int between = turns > 2 ? (turns - 2) * size * full : 0;
    if (t < between) {
        const int turn = 1 + t / (size * full), chunk = t / full % size;
        return in(t % full, chunk < peers ? turn : turn - 1, chunk);
    }
    t -= between;
    if (turns > 1) {
        if (t < peers * part) return in(t % part, turns - 1, t / part);
        t -= peers * part;
        if (t < full) return in(t, turns - 2, peers);
        t -= full;
    }
    return in(t, turns - 1, peers);
}

struct Pushes {
    long long bytes, piece;  // of the rows; of one tile of them
    int unit;

    HD int of_piece(int p) const {
        const long long rest = bytes - p * piece;
        return int(((rest < piece ? rest : piece) + unit - 1) / unit);
    }
    HD int pieces() const { return int((bytes + piece - 1) / piece); }
    HD int to_one_peer() const { return (pieces() - 1) * of_piece(0) + of_piece(pieces() - 1); }
};

struct Push {
    int step, piece, bytes;
    long long at;
};

// Push `q` of all: to the next peer first, in the order of the rows.
HD Push push_of(int q, const Pushes &all) {
    const int each = all.to_one_peer(), full = all.of_piece(0), in = q % each;
    const int piece = in / full;
    const long long start = (long long)(in % full) * all.unit;
    const long long rest = all.bytes - piece * all.piece;
    const long long end = (rest < all.piece ? rest : all.piece) - start;
    return {q / each + 1, piece, int(end < all.unit ? end : all.unit), piece * all.piece + start};
}
