#include "linear.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "isa.hpp"
#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

static_assert(kGroup == kGroupSize);

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

size_t weight_tile_bytes(Dtype dtype, int64_t k) {
  if (dtype == Dtype::int8) return static_cast<size_t>(divide_up(k, kGroup)) * sizeof(WeightGroup);
  return static_cast<size_t>(k * kTileOutputs) * sizeof(float);
}

size_t activation_row_bytes(Dtype dtype, int64_t k) {
  if (dtype == Dtype::int8) return static_cast<size_t>(divide_up(k, kGroup) * kGroupBytesPerRow);
  return static_cast<size_t>(k) * sizeof(float);
}

// Cuts m rows into the fewest tiles, as even as can be: 32 rows in tiles of at most 6 are 5 5 5 5 6 6.
struct RowTiles {
  RowTiles(int64_t m, int64_t max_rows) : num_rows(m), count(divide_up(m, max_rows)) {}
  int64_t begin(int64_t tile) const { return tile * num_rows / count; }
  int rows(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
  int64_t num_rows;
  int64_t count;
};

// A share is a run of output tiles times a run of row tiles; few rows make short shares, so fewer of them.
struct Shares {
  Shares(int64_t num_output_tiles, const RowTiles& row_tiles, int64_t num_threads) {
    const int64_t wanted = num_threads == 1 ? 1 : num_threads * (row_tiles.num_rows < 16 ? 4 : 16);
    tiles_per_share = divide_up(num_output_tiles, wanted);
    num_column_shares = tiles_per_share == 0 ? 0 : divide_up(num_output_tiles, tiles_per_share);
    num_row_shares = num_column_shares >= 2 * num_threads || num_column_shares == 0
                         ? 1
                         : std::min(row_tiles.count, divide_up(2 * num_threads, num_column_shares));
  }
  int64_t count() const { return num_column_shares * num_row_shares; }
  int64_t first_tile(int64_t share) const { return share / num_row_shares * tiles_per_share; }
  int64_t tiles_per_share, num_column_shares, num_row_shares;
};

// Which lines of what comes later each pass over a tile fetches: blocks are cut into pieces, as many as make
// at most one a pass.
class Pieces {
 public:
  Pieces(const Upcoming& upcoming, int64_t num_passes, int64_t num_groups)
      : upcoming_(upcoming), num_passes_(num_passes) {
    if (upcoming.num_blocks == 0) return;
    const int64_t lines = divide_up(upcoming.block_bytes, 64);
    const int64_t pieces_a_block = std::max<int64_t>(1, num_passes / upcoming.num_blocks);
    lines_per_group_ = static_cast<int>(divide_up(divide_up(lines, pieces_a_block), num_groups));
    pieces_a_block_ = divide_up(lines, lines_per_group_ * num_groups);
    piece_bytes_ = lines_per_group_ * num_groups * 64;
    count_ = std::min(num_passes, pieces_a_block_ * upcoming.num_blocks);
  }

  int lines_per_group() const { return lines_per_group_; }

  // Where the piece of a pass begins; null where it has none.
  const uint8_t* of(int64_t pass) const {
    const int64_t piece = pass * count_ / num_passes_;
    if ((pass + 1) * count_ / num_passes_ == piece) return nullptr;
    const int64_t block = upcoming_.blocks[piece / pieces_a_block_];
    return upcoming_.base + block * upcoming_.block_stride + piece % pieces_a_block_ * piece_bytes_;
  }

 private:
  const Upcoming& upcoming_;
  int64_t num_passes_;
  int64_t count_ = 0, pieces_a_block_ = 1, piece_bytes_ = 0;
  int lines_per_group_ = 0;
};

void pack_int8_tile(const float* w, int64_t outputs, int64_t k, int offset, WeightGroup* tile) {
  int8_t q[kGroup];
  for (int64_t g = 0; g * kGroup < k; ++g) {
    WeightGroup& group = tile[g];
    const int64_t inputs = std::min(kGroup, k - g * kGroup);
    std::memset(group.values, offset, sizeof group.values);
    std::memset(group.scales, 0, sizeof group.scales);
    for (int64_t o = 0; o < outputs; ++o) {
      group.scales[o] = quantize_group(w + o * k + g * kGroup, inputs, q);
      for (int64_t i = 0; i < kGroup; ++i) {
        group.values[i / 4][o][i % 4] = static_cast<uint8_t>(q[i] + offset);
      }
    }
  }
}

void pack_float32_tile(const float* w, int64_t outputs, int64_t k, float* tile) {
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t o = 0; o < kTileOutputs; ++o) tile[i * kTileOutputs + o] = o < outputs ? w[o * k + i] : 0.0f;
  }
}

void interleave_float32_tile(const float* x, int64_t ldx, int rows, int64_t k, float* tile) {
  for (int64_t i = 0; i < k; ++i) {
    for (int r = 0; r < rows; ++r) tile[i * rows + r] = x[r * ldx + i];
  }
}

}  // namespace

const LinearKernels& linear_kernels() {
  switch (active_isa()) {
#if defined(__x86_64__)
    case Isa::avx512vnni:
      return linear_kernels_avx512();
    case Isa::avxvnni:
      return linear_kernels_avxvnni();
    case Isa::avx2:
      return linear_kernels_avx2();
#elif defined(__aarch64__)
    case Isa::neon:
      return linear_kernels_neon();
#endif
    default:
      return linear_kernels_portable();
  }
}

const char* linear_layout_name(Dtype dtype) {
  return dtype == Dtype::int8 ? linear_kernels().int8_layout : linear_kernels().float32_layout;
}

size_t packed_linear_bytes(Dtype dtype, int64_t n, int64_t k) {
  return static_cast<size_t>(divide_up(n, kTileOutputs)) * weight_tile_bytes(dtype, k);
}

void pack_linear(Dtype dtype, const float* w, int64_t n, int64_t k, uint8_t* out, ThreadTeam& team) {
  const size_t tile_bytes = weight_tile_bytes(dtype, k);
  const int offset = linear_kernels().weight_offset;
  team.run(divide_up(n, kTileOutputs), [&](int64_t tile, int) {
    const int64_t first = tile * kTileOutputs;
    const int64_t outputs = std::min(kTileOutputs, n - first);
    uint8_t* packed = out + static_cast<size_t>(tile) * tile_bytes;
    if (dtype == Dtype::int8) {
      pack_int8_tile(w + first * k, outputs, k, offset, reinterpret_cast<WeightGroup*>(packed));
    } else {
      pack_float32_tile(w + first * k, outputs, k, reinterpret_cast<float*>(packed));
    }
  });
}

size_t activation_bytes(Dtype dtype, int64_t max_rows, int64_t k) {
  return static_cast<size_t>(max_rows) * activation_row_bytes(dtype, k);
}

void prepare_activations(Dtype dtype, const float* x, int64_t m, int64_t k, int64_t ldx, uint8_t* scratch,
                         ThreadTeam& team, const RowMaker& make_rows) {
  const LinearKernels& kernels = linear_kernels();
  const RowTiles tiles(m, kernels.max_tile_rows);
  const size_t row_bytes = activation_row_bytes(dtype, k);
  team.run(tiles.count, [&](int64_t tile, int) {
    const int64_t first = tiles.begin(tile);
    uint8_t* out = scratch + static_cast<size_t>(first) * row_bytes;
    make_rows(first, tiles.rows(tile));
    if (dtype == Dtype::int8) {
      kernels.quantize_tile(x + first * ldx, ldx, tiles.rows(tile), k, out);
    } else {
      interleave_float32_tile(x + first * ldx, ldx, tiles.rows(tile), k, reinterpret_cast<float*>(out));
    }
  });
}

void linear_forward(Dtype dtype, const uint8_t* packed, const uint8_t* activations, int64_t m, int64_t n,
                    int64_t k, const float* bias, float* y, int64_t ldy, ThreadTeam& team,
                    const Upcoming& upcoming, const NextLayer& next) {
  if (m == 0 || n == 0) return;
  assert(reinterpret_cast<uintptr_t>(packed) % 64 == 0);
  const LinearKernels& kernels = linear_kernels();
  const RowTiles row_tiles(m, kernels.max_tile_rows);
  const int64_t num_output_tiles = divide_up(n, kTileOutputs);
  const size_t tile_bytes = weight_tile_bytes(dtype, k);
  const size_t row_bytes = activation_row_bytes(dtype, k);
  const int64_t num_groups = divide_up(k, kGroup);
  const Pieces pieces(upcoming, num_output_tiles * row_tiles.count, num_groups);

  const Shares shares(num_output_tiles, row_tiles, team.size());
  const Shares next_shares(divide_up(next.n, kTileOutputs), row_tiles, team.size());
  const size_t next_tile_bytes = next.packed == nullptr ? 0 : weight_tile_bytes(dtype, next.k);
  // Where the weights of a share begin, or those of the next layer's shares behind the last one.
  const auto weights_of_share = [&](int64_t share) {
    if (share < shares.count()) return packed + static_cast<size_t>(shares.first_tile(share)) * tile_bytes;
    const int64_t tile = next_shares.first_tile(share - shares.count());
    return next.packed + static_cast<size_t>(tile) * next_tile_bytes;
  };

  team.run(shares.count(), [&](int64_t share, int) {
    const int64_t row_share = share % shares.num_row_shares;
    const int64_t first_row_tile = row_share * row_tiles.count / shares.num_row_shares;
    const int64_t last_row_tile = (row_share + 1) * row_tiles.count / shares.num_row_shares;
    const int64_t first_output_tile = shares.first_tile(share);
    const int64_t last_output_tile = std::min(first_output_tile + shares.tiles_per_share, num_output_tiles);
    const int64_t passes = last_row_tile - first_row_tile;
    // One pass runs at the speed of memory and leaves the fetching to the hardware.
    const int lines_per_group =
        passes == 1 ? 0
                    : static_cast<int>(divide_up(static_cast<int64_t>(tile_bytes), passes * num_groups * 64));
    // Shares are taken in order, so this is the one that this thread will most likely take next.
    const uint8_t* following = weights_of_share(share + team.size());
    for (int64_t tile = first_output_tile; tile < last_output_tile; ++tile) {
      const uint8_t* weights = packed + static_cast<size_t>(tile) * tile_bytes;
      const uint8_t* next_weights = tile + 1 < last_output_tile ? weights + tile_bytes : following;
      const int64_t first_output = tile * kTileOutputs;
      for (int64_t row_tile = first_row_tile; row_tile < last_row_tile; ++row_tile) {
        const int64_t row = row_tiles.begin(row_tile);
        const uint8_t* x = activations + static_cast<size_t>(row) * row_bytes;
        // The passes over this tile of weights share the work of fetching the next.
        const int64_t pass = row_tile - first_row_tile;
        const uint8_t* later = pieces.of(tile * row_tiles.count + row_tile);
        const Prefetch ahead{next_weights + static_cast<size_t>(pass * num_groups * lines_per_group) * 64,
                             lines_per_group, later, later == nullptr ? 0 : pieces.lines_per_group()};
        const TileOutput out{bias == nullptr ? nullptr : bias + first_output, y + row * ldy + first_output,
                             ldy, static_cast<int>(std::min(kTileOutputs, n - first_output))};
        if (dtype == Dtype::int8) {
          kernels.int8_tile(reinterpret_cast<const WeightGroup*>(weights), x, row_tiles.rows(row_tile),
                            num_groups, ahead, out);
        } else {
          kernels.float32_tile(reinterpret_cast<const float*>(weights), reinterpret_cast<const float*>(x),
                               row_tiles.rows(row_tile), k, ahead, out);
        }
      }
    }
  });
}

}  // namespace everystop
