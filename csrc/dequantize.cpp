#include "dequantize.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace everystop {
namespace {

constexpr int64_t kBlock = 32;        // values in a block of the simple formats
constexpr int64_t kSuperBlock = 256;  // values in a block of the K formats

struct Format {
  GgmlType type;
  const char* name;
  int64_t block_values;
  size_t block_bytes;
  void (*convert)(const uint8_t* block, float* out);
};

uint16_t load_u16(const uint8_t* p) {
  return static_cast<uint16_t>(p[0] | p[1] << 8);
}

uint32_t load_u32(const uint8_t* p) {
  return static_cast<uint32_t>(load_u16(p)) | static_cast<uint32_t>(load_u16(p + 2)) << 16;
}

float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float load_f16(const uint8_t* p) {
  const uint32_t half = load_u16(p);
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -subnormal : subnormal;
}

void convert_f32(const uint8_t* block, float* out) {
  *out = float_from_bits(load_u32(block));
}
void convert_f16(const uint8_t* block, float* out) {
  *out = load_f16(block);
}
void convert_bf16(const uint8_t* block, float* out) {
  *out = float_from_bits(static_cast<uint32_t>(load_u16(block)) << 16);
}

// f16 scale, 16 bytes of two nibbles: the low ones are values 0 to 15, the high ones 16 to 31.
void convert_q4_0(const uint8_t* block, float* out) {
  const float scale = load_f16(block);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>((block[2 + i] & 15) - 8) * scale;
    out[i + 16] = static_cast<float>((block[2 + i] >> 4) - 8) * scale;
  }
}

// f16 scale, f16 minimum, nibbles as in Q4_0.
void convert_q4_1(const uint8_t* block, float* out) {
  const float scale = load_f16(block);
  const float minimum = load_f16(block + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(block[4 + i] & 15) * scale + minimum;
    out[i + 16] = static_cast<float>(block[4 + i] >> 4) * scale + minimum;
  }
}

// The 5-bit value at `i`: its low bits are nibbles as in Q4_0, its highest is bit i of `high`.
int five_bits(const uint8_t* nibbles, uint32_t high, int i) {
  const int low = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
  return low | static_cast<int>(high >> i & 1) << 4;
}

// f16 scale, 32 high bits, nibbles.
void convert_q5_0(const uint8_t* block, float* out) {
  const float scale = load_f16(block);
  const uint32_t high = load_u32(block + 2);
  for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(five_bits(block + 6, high, i) - 16) * scale;
}

// f16 scale, f16 minimum, 32 high bits, nibbles.
void convert_q5_1(const uint8_t* block, float* out) {
  const float scale = load_f16(block);
  const float minimum = load_f16(block + 2);
  const uint32_t high = load_u32(block + 4);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = static_cast<float>(five_bits(block + 8, high, i)) * scale + minimum;
  }
}

// f16 scale, 32 signed bytes.
void convert_q8_0(const uint8_t* block, float* out) {
  const float scale = load_f16(block);
  for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

// Scale and minimum, 6 bits each, of one of the eight 32-value parts of a Q4_K or Q5_K block, from its 12
// bytes.
struct PartScale {
  PartScale(const uint8_t* p, int part)
      : scale(part < 4 ? p[part] & 63 : (p[part + 4] & 15) | p[part - 4] >> 6 << 4),
        minimum(part < 4 ? p[part + 4] & 63 : p[part + 4] >> 4 | p[part] >> 6 << 4) {}
  int scale;
  int minimum;
};

// f16 scale of scales, f16 scale of minimums, 12 bytes of PartScale, then (Q5_K: 32 bytes of high bits, bit p
// of byte i for value i of part p) 128 bytes of nibbles: 32 bytes hold part 2c low and part 2c + 1 high.
void convert_k_parts(const uint8_t* block, const uint8_t* high, const uint8_t* nibbles, float* out) {
  const float scale = load_f16(block);
  const float minimum = load_f16(block + 2);
  for (int part = 0; part < 8; ++part) {
    const PartScale p(block + 4, part);
    const float part_scale = scale * static_cast<float>(p.scale);
    const float part_minimum = minimum * static_cast<float>(p.minimum);
    const uint8_t* bytes = nibbles + part / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      int q = part % 2 == 0 ? bytes[i] & 15 : bytes[i] >> 4;
      if (high != nullptr) q |= (high[i] >> part & 1) << 4;
      out[part * 32 + i] = part_scale * static_cast<float>(q) - part_minimum;
    }
  }
}

void convert_q4_k(const uint8_t* block, float* out) {
  convert_k_parts(block, nullptr, block + 16, out);
}
void convert_q5_k(const uint8_t* block, float* out) {
  convert_k_parts(block, block + 16, block + 48, out);
}

// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales (one for 16 values), f16 scale of
// scales. Each half of 128 values has four parts of 32: nibbles of 64 bytes (parts 0 and 1 low, 2 and 3 high)
// and the part's pair of bits in 32 bytes.
void convert_q6_k(const uint8_t* block, float* out) {
  const float scale = load_f16(block + 208);
  for (int part = 0; part < 8; ++part) {
    const int half = part / 4;
    const int quarter = part % 4;
    const uint8_t* nibbles = block + half * 64 + quarter % 2 * 32;
    const uint8_t* pairs = block + 128 + half * 32;
    for (int i = 0; i < 32; ++i) {
      const int low = quarter < 2 ? nibbles[i] & 15 : nibbles[i] >> 4;
      const int q = (low | (pairs[i] >> (2 * quarter) & 3) << 4) - 32;
      const float group_scale =
          scale * static_cast<float>(static_cast<int8_t>(block[192 + part * 2 + i / 16]));
      out[part * 32 + i] = group_scale * static_cast<float>(q);
    }
  }
}

constexpr Format kFormats[] = {
    {GgmlType::f32, "F32", 1, 4, convert_f32},
    {GgmlType::f16, "F16", 1, 2, convert_f16},
    {GgmlType::bf16, "BF16", 1, 2, convert_bf16},
    {GgmlType::q4_0, "Q4_0", kBlock, 18, convert_q4_0},
    {GgmlType::q4_1, "Q4_1", kBlock, 20, convert_q4_1},
    {GgmlType::q5_0, "Q5_0", kBlock, 22, convert_q5_0},
    {GgmlType::q5_1, "Q5_1", kBlock, 24, convert_q5_1},
    {GgmlType::q8_0, "Q8_0", kBlock, 34, convert_q8_0},
    {GgmlType::q4_k, "Q4_K", kSuperBlock, 144, convert_q4_k},
    {GgmlType::q5_k, "Q5_K", kSuperBlock, 176, convert_q5_k},
    {GgmlType::q6_k, "Q6_K", kSuperBlock, 210, convert_q6_k},
};

const Format& format_of(int id) {
  for (const Format& format : kFormats) {
    if (static_cast<int>(format.type) == id) return format;
  }
  std::string known;
  for (const Format& format : kFormats) {
    known += (known.empty() ? "" : ", ") + std::string(format.name) + " (" +
             std::to_string(static_cast<int>(format.type)) + ")";
  }
  throw std::invalid_argument("GGML type " + std::to_string(id) + " is not supported; supported are " +
                              known);
}

}  // namespace

GgmlType ggml_type(int id) {
  return format_of(id).type;
}

size_t ggml_row_bytes(GgmlType type, int64_t k) {
  const Format& format = format_of(static_cast<int>(type));
  if (k < 0 || k % format.block_values != 0) {
    throw std::invalid_argument(std::string(format.name) + " rows hold a multiple of " +
                                std::to_string(format.block_values) + " values, not " + std::to_string(k));
  }
  return static_cast<size_t>(k / format.block_values) * format.block_bytes;
}

void dequantize(GgmlType type, const uint8_t* raw, int64_t n_rows, int64_t k, float* out, ThreadTeam& team) {
  const Format& format = format_of(static_cast<int>(type));
  const int64_t num_blocks = n_rows * static_cast<int64_t>(ggml_row_bytes(type, k) / format.block_bytes);
  const int64_t blocks_per_tile = (1 << 16) / format.block_values;
  team.run((num_blocks + blocks_per_tile - 1) / blocks_per_tile, [&](int64_t tile, int) {
    const int64_t end = std::min((tile + 1) * blocks_per_tile, num_blocks);
    for (int64_t block = tile * blocks_per_tile; block < end; ++block) {
      format.convert(raw + static_cast<size_t>(block) * format.block_bytes,
                     out + block * format.block_values);
    }
  });
}

}  // namespace everystop
