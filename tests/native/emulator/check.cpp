// Runs each of AVX-VNNI's instructions in many forms and holds the results against their definition: for the
// emulator, and, on a CPU that has them, for this check itself. Exits with 0 if all agree.
#include <cstdint>
#include <cstdio>
#include <cstring>

struct alignas(32) Vector {
  uint8_t bytes[64];
};

extern "C" {
Vector relative_operand;
}

namespace {

uint32_t random_state = 1;
int num_wrong = 0;

Vector random_vector() {
  Vector v;
  for (uint8_t& byte : v.bytes) {
    random_state = random_state * 1664525u + 1013904223u;
    const uint32_t kind = random_state >> 29;
    byte = kind == 0 ? 0x80 : kind == 1 ? 0x7f : kind == 2 ? 0xff : static_cast<uint8_t>(random_state >> 16);
  }
  return v;
}

int32_t int_at(const Vector& v, int i) {
  int32_t value;
  std::memcpy(&value, v.bytes + 4 * i, sizeof value);
  return value;
}

int32_t expected_lane(bool words, bool saturates, int32_t sum, const Vector& a, const Vector& b, int i) {
  __int128 exact = sum;
  for (int j = 0; j < 4 && !words; ++j) {
    exact += static_cast<int>(a.bytes[4 * i + j]) * static_cast<int8_t>(b.bytes[4 * i + j]);
  }
  for (int j = 0; j < 2 && words; ++j) {
    int16_t x, y;
    std::memcpy(&x, a.bytes + 4 * i + 2 * j, 2);
    std::memcpy(&y, b.bytes + 4 * i + 2 * j, 2);
    exact += static_cast<__int128>(x) * y;
  }
  if (saturates && exact > INT32_MAX) return INT32_MAX;
  if (saturates && exact < INT32_MIN) return INT32_MIN;
  return static_cast<int32_t>(static_cast<int64_t>(exact));
}

void compare(const char* form, bool words, bool saturates, int lanes, const Vector& sum, const Vector& a,
             const Vector& b, const Vector& result) {
  for (int i = 0; i < 8; ++i) {
    const int32_t expected = i < lanes ? expected_lane(words, saturates, int_at(sum, i), a, b, i)
                                       : 0;  // the upper half is cleared
    if (int_at(result, i) != expected) {
      std::printf("%s: lane %d is %d, not %d\n", form, i, int_at(result, i), expected);
      ++num_wrong;
    }
  }
}

// Loads dst, a and b into the named registers, runs one instruction, and stores the whole destination.
#define RUN(name, words, saturates, form, lanes, text, dst, one, two)                                    \
  {                                                                                                      \
    const Vector sum = random_vector(), a = random_vector(), b = random_vector();                        \
    Vector result;                                                                                       \
    relative_operand = b;                                                                                \
    const uintptr_t beside = reinterpret_cast<uintptr_t>(b.bytes) - 1024, nearer = beside + 64;          \
    const int64_t index = 128;                                                                           \
    asm volatile("vmovdqa (%[sum]), %%ymm" dst                                                           \
                 "\n\t"                                                                                  \
                 "vmovdqa (%[a]), %%ymm" one                                                             \
                 "\n\t"                                                                                  \
                 "vmovdqa (%[b]), %%ymm" two                                                             \
                 "\n\t"                                                                                  \
                 "%{vex%} " name " " text                                                                \
                 "\n\t"                                                                                  \
                 "vmovdqa %%ymm" dst ", (%[result])\n\tvzeroupper"                                       \
                 :                                                                                       \
                 : [sum] "r"(sum.bytes), [a] "r"(a.bytes), [b] "r"(b.bytes), [result] "r"(result.bytes), \
                   [beside] "r"(beside), [nearer] "r"(nearer), [index] "r"(index)                        \
                 : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm9", "xmm10", "xmm11", "xmm15");         \
    compare(name " " form, words, saturates, lanes, sum, a, b, result);                                  \
  }

#define RUN_ALL(name, words, saturates)                                                                      \
  RUN(name, words, saturates, "ymm", 8, "%%ymm3, %%ymm2, %%ymm1", "1", "2", "3")                             \
  RUN(name, words, saturates, "xmm", 4, "%%xmm3, %%xmm2, %%xmm1", "1", "2", "3")                             \
  RUN(name, words, saturates, "ymm high", 8, "%%ymm11, %%ymm10, %%ymm9", "9", "10", "11")                    \
  RUN(name, words, saturates, "ymm mixed", 8, "%%ymm0, %%ymm15, %%ymm9", "9", "15", "0")                     \
  RUN(name, words, saturates, "memory", 8, "(%[b]), %%ymm2, %%ymm1", "1", "2", "3")                          \
  RUN(name, words, saturates, "memory xmm", 4, "(%[b]), %%xmm2, %%xmm1", "1", "2", "3")                      \
  RUN(name, words, saturates, "memory, far", 8, "1024(%[beside]), %%ymm10, %%ymm9", "9", "10", "3")          \
  RUN(name, words, saturates, "memory, indexed", 8, "(%[beside],%[index],8), %%ymm2, %%ymm1", "1", "2", "3") \
  RUN(name, words, saturates, "memory, nearer", 8, "-64(%[nearer],%[index],8), %%ymm2, %%ymm1", "1", "2",    \
      "3")                                                                                                   \
  RUN(name, words, saturates, "memory, relative", 8, "relative_operand(%%rip), %%ymm2, %%ymm1", "1", "2", "3")

}  // namespace

int main() {
  for (int turn = 0; turn < 100; ++turn) {
    RUN_ALL("vpdpbusd", false, false)
    RUN_ALL("vpdpbusds", false, true)
    RUN_ALL("vpdpwssd", true, false)
    RUN_ALL("vpdpwssds", true, true)
  }
  std::printf("%d wrong\n", num_wrong);
  return num_wrong != 0;
}
