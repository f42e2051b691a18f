// Carries out AVX-VNNI's instructions on a CPU that lacks them: a library to preload, for tests alone.
//
// The CPU raises #UD at VPDPBUSD, VPDPBUSDS, VPDPWSSD and VPDPWSSDS in their VEX encoding (Intel 64 Software
// Developer's Manual, volume 2). The handler of SIGILL decodes the instruction, computes its result on the
// registers that the kernel has saved in the signal's frame, and goes on behind it. Any other instruction
// dies of SIGILL as before. Numbers of instructions are printed at the end.
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr uint32_t kXstateMagic = 0x46505853;  // FP_XSTATE_MAGIC1: the frame holds more than the legacy state
constexpr size_t kSoftwareBytes = 464;         // where the legacy state says so
constexpr size_t kXmm = 160, kHeader = 512;
constexpr int kSse = 1, kYmmHigh = 2, kZmmHigh = 6;  // components of the state

std::atomic<uint64_t> num_register_forms{0}, num_memory_forms{0};
uint32_t ymm_high_offset, zmm_high_offset;

struct Vector {
  uint8_t bytes[32];
};

struct Instruction {
  uint8_t opcode;
  int num_bytes;    // of the vectors: 16 or 32
  int destination;  // register numbers
  int first;
  int second;           // -1: in memory
  const void* address;  // of the second, in memory
  int length;           // of the instruction
};

// The saved registers of a signal's frame, in XSAVE's standard form.
class SavedState {
 public:
  explicit SavedState(const ucontext_t* context)
      : base_(reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs)) {}

  bool is_extended() const { return base_ != nullptr && word(kSoftwareBytes) == kXstateMagic; }

  Vector read(int number) const {
    Vector v{};
    if (holds(kSse)) std::memcpy(v.bytes, base_ + kXmm + 16 * number, 16);
    if (holds(kYmmHigh)) std::memcpy(v.bytes + 16, base_ + ymm_high_offset + 16 * number, 16);
    return v;
  }

  // A VEX instruction clears all that lies above what it writes.
  void write(int number, const Vector& v) {
    claim(kSse, base_ + kXmm, 16 * 16);
    claim(kYmmHigh, base_ + ymm_high_offset, 16 * 16);
    std::memcpy(base_ + kXmm + 16 * number, v.bytes, 16);
    std::memcpy(base_ + ymm_high_offset + 16 * number, v.bytes + 16, 16);
    if (holds(kZmmHigh)) std::memset(base_ + zmm_high_offset + 32 * number, 0, 32);
  }

 private:
  uint32_t word(size_t offset) const {
    uint32_t value;
    std::memcpy(&value, base_ + offset, sizeof value);
    return value;
  }

  bool holds(int component) const { return (word(kHeader) >> component & 1) != 0; }

  // A component that is not held is zero, whatever its bytes are.
  void claim(int component, uint8_t* begin, size_t size) {
    if (holds(component)) return;
    std::memset(begin, 0, size);
    const uint32_t held = word(kHeader) | 1u << component;
    std::memcpy(base_ + kHeader, &held, sizeof held);
  }

  uint8_t* base_;
};

int64_t general_register(const ucontext_t* context, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[kOrder[number]];
}

template <class T>
T read_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Decodes a memory operand behind ModRM; returns what follows it. `base_high` and `index_high` are 8 or 0.
const uint8_t* decode_address(const ucontext_t* context, const uint8_t* p, uint8_t modrm, int base_high,
                              int index_high, int64_t* address) {
  const int mode = modrm >> 6, rm = modrm & 7;
  *address = 0;
  if (rm == 4) {
    const uint8_t sib = *p++;
    const int index = (sib >> 3 & 7) | index_high, base = sib & 7;
    if (index != 4) *address += general_register(context, index) << (sib >> 6);
    if (base == 5 && mode == 0) {
      *address += read_as<int32_t>(p);
      return p + 4;
    }
    *address += general_register(context, base | base_high);
  } else if (rm == 5 && mode == 0) {
    *address = reinterpret_cast<int64_t>(p + 4) + read_as<int32_t>(p);  // relative to the next instruction
    return p + 4;
  } else {
    *address += general_register(context, rm | base_high);
  }
  if (mode == 1) *address += static_cast<int8_t>(*p);
  if (mode == 2) *address += read_as<int32_t>(p);
  return p + (mode == 1 ? 1 : mode == 2 ? 4 : 0);
}

// VEX.128/256.66.0F38.W0 50 to 53 /r; false for anything else.
bool decode(const ucontext_t* context, const uint8_t* start, Instruction* out) {
  if (start[0] != 0xc4) return false;
  const uint8_t vex1 = start[1], vex2 = start[2];
  if ((vex1 & 0x1f) != 0x02 || (vex2 & 0x83) != 0x01) return false;
  if (start[3] < 0x50 || start[3] > 0x53) return false;
  const uint8_t modrm = start[4];
  const int reg_high = vex1 & 0x80 ? 0 : 8, index_high = vex1 & 0x40 ? 0 : 8, base_high = vex1 & 0x20 ? 0 : 8;
  out->opcode = start[3];
  out->num_bytes = vex2 & 0x04 ? 32 : 16;
  out->destination = (modrm >> 3 & 7) | reg_high;
  out->first = ~(vex2 >> 3) & 15;
  out->second = -1;
  const uint8_t* end = start + 5;
  if (modrm >> 6 == 3) {
    out->second = (modrm & 7) | base_high;
  } else {
    int64_t address;
    end = decode_address(context, end, modrm, base_high, index_high, &address);
    out->address = reinterpret_cast<const void*>(address);
  }
  out->length = static_cast<int>(end - start);
  return true;
}

int32_t saturate(int64_t value) {
  if (value > INT32_MAX) return INT32_MAX;
  if (value < INT32_MIN) return INT32_MIN;
  return static_cast<int32_t>(value);
}

int32_t dot(uint8_t opcode, int32_t sum, const uint8_t* a, const uint8_t* b) {
  int64_t exact = sum;
  if (opcode <= 0x51) {
    for (int i = 0; i < 4; ++i) exact += int64_t{a[i]} * static_cast<int8_t>(b[i]);
  } else {
    for (int i = 0; i < 4; i += 2) exact += int64_t{read_as<int16_t>(a + i)} * read_as<int16_t>(b + i);
  }
  if (opcode & 1) return saturate(exact);
  return static_cast<int32_t>(static_cast<uint32_t>(exact));
}

void carry_out(const Instruction& instruction, SavedState& state) {
  const Vector a = state.read(instruction.first), old = state.read(instruction.destination);
  Vector b{}, result{};
  if (instruction.second >= 0) {
    b = state.read(instruction.second);
  } else {
    std::memcpy(b.bytes, instruction.address, static_cast<size_t>(instruction.num_bytes));
  }
  for (int i = 0; i < instruction.num_bytes; i += 4) {
    const int32_t sum = dot(instruction.opcode, read_as<int32_t>(old.bytes + i), a.bytes + i, b.bytes + i);
    std::memcpy(result.bytes + i, &sum, sizeof sum);
  }
  state.write(instruction.destination, result);
}

void handle(int, siginfo_t*, void* raw_context) {
  auto* context = static_cast<ucontext_t*>(raw_context);
  auto& next = context->uc_mcontext.gregs[REG_RIP];
  SavedState state(context);
  Instruction instruction{};
  if (!state.is_extended() || !decode(context, reinterpret_cast<const uint8_t*>(next), &instruction)) {
    signal(SIGILL, SIG_DFL);  // the instruction is met again, and ends the process
    return;
  }
  carry_out(instruction, state);
  (instruction.second >= 0 ? num_register_forms : num_memory_forms).fetch_add(1, std::memory_order_relaxed);
  next += instruction.length;
}

uint32_t component_offset(unsigned component) {
  unsigned size = 0, offset = 0, c = 0, d = 0;
  __get_cpuid_count(0xd, component, &size, &offset, &c, &d);
  return offset;
}

[[gnu::constructor]] void install() {
  ymm_high_offset = component_offset(kYmmHigh);
  zmm_high_offset = component_offset(kZmmHigh);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

[[gnu::destructor]] void report() {
  const unsigned long registers = num_register_forms.load(), memory = num_memory_forms.load();
  if (registers + memory > 0) std::fprintf(stderr, "emulated: %lu register, %lu memory\n", registers, memory);
}

}  // namespace

// What Everystop asks where the CPU lacks AVX-VNNI; nobody else defines it.
extern "C" [[gnu::visibility("default")]] bool everystop_emulates_avxvnni() {
  return true;
}
