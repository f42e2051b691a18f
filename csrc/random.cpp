#include "random.hpp"

namespace everystop {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * counter[0];
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

double uniform_draw(uint64_t seed, uint32_t choice, uint64_t position, DrawKind kind) {
  const std::array<uint32_t, 4> words =
      philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice,
                  static_cast<uint32_t>(kind)},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (static_cast<uint64_t>(words[0]) << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace everystop
