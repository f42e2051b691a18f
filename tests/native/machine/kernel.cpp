// As much of Linux as a static program with one thread needs, on a bare machine: memory, what it writes, and
// its end. The program runs in ring 0, in memory that is not protected. Everything that it writes goes out of
// the first serial port; the last line says how it ended, and then the emulator is told to stop.
#include <asm/prctl.h>
#include <asm/unistd_64.h>
#include <elf.h>

#include <cstddef>
#include <cstdint>

extern "C" {
void system_call_entry();
extern const char exception_entries[];
int64_t system_call(int64_t number, uint64_t a, uint64_t b, uint64_t c);
[[noreturn]] void exception(uint64_t number, uint64_t error, uint64_t address);
[[noreturn]] void kernel_main(const uint8_t* program, const char* environment);
}

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHeapEnd = 0x2000000, kMapEnd = 0x6000000, kStack = 0x7000000;
constexpr uint16_t kCode64 = 0x18;
constexpr int64_t kNotSupported = -38, kNoMemory = -12, kInvalid = -22;

uint64_t heap_start, heap_end, map_end = kHeapEnd;
struct [[gnu::packed]] {
  uint16_t offset_low, selector, type, offset_middle;
  uint32_t offset_high, reserved;
} gates[32];

void write_port(uint16_t port, uint8_t value) {
  asm volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

uint8_t read_port(uint16_t port) {
  uint8_t value;
  asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

void write_register(uint32_t number, uint64_t value) {
  asm volatile("wrmsr"
               :
               : "c"(number), "a"(static_cast<uint32_t>(value)), "d"(static_cast<uint32_t>(value >> 32)));
}

constexpr uint16_t kSerial = 0x3f8;

void start_serial() {
  write_port(kSerial + 3, 0x83);  // 8 bits; the next two set the speed
  write_port(kSerial + 0, 1);
  write_port(kSerial + 1, 0);
  write_port(kSerial + 3, 0x03);
}

void put(char c) {
  while ((read_port(kSerial + 5) & 0x20) == 0) {
  }
  write_port(kSerial, static_cast<uint8_t>(c));
}

void print(const char* text) {
  for (; *text != '\0'; ++text) put(*text);
}

void print_number(uint64_t value) {
  if (value >> 4 != 0) print_number(value >> 4);
  put("0123456789abcdef"[value & 15]);
}

[[noreturn]] void stop() {
  while ((read_port(kSerial + 5) & 0x40) == 0) {  // the last byte is still on its way
  }
  for (const char* word = "Shutdown"; *word != '\0'; ++word) write_port(0x8900, static_cast<uint8_t>(*word));
  while (true) asm volatile("hlt");
}

[[noreturn]] void exit_program(uint64_t status) {
  print("\nexit ");
  print_number(status & 255);
  print("\n");
  stop();
}

void copy(void* to, const void* from, uint64_t size) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}

uint64_t round_up(uint64_t value) {
  return (value + kPage - 1) & ~(kPage - 1);
}

int64_t write_text(uint64_t address, uint64_t size) {
  const char* text = reinterpret_cast<const char*>(address);
  for (uint64_t i = 0; i < size; ++i) put(text[i]);
  return static_cast<int64_t>(size);
}

int64_t write_pieces(uint64_t address, uint64_t count) {
  struct Piece {
    uint64_t address, size;
  };
  int64_t total = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const Piece& piece = reinterpret_cast<const Piece*>(address)[i];
    total += write_text(piece.address, piece.size);
  }
  return total;
}

int64_t set_heap_end(uint64_t end) {
  if (end >= heap_start && end <= kHeapEnd) heap_end = end;
  return static_cast<int64_t>(heap_end);
}

// Memory that was given once is never given again, so it is always zero.
int64_t map_memory(uint64_t size) {
  if (round_up(size) > kMapEnd - map_end) return kNoMemory;
  const uint64_t start = map_end;
  map_end += round_up(size);
  return static_cast<int64_t>(start);
}

int64_t name_system(uint64_t address) {
  constexpr uint64_t kFieldBytes = 65;
  constexpr char kName[] = "Linux", kRelease[] = "6.1.0";
  copy(reinterpret_cast<void*>(address), kName, sizeof kName);
  copy(reinterpret_cast<void*>(address + 2 * kFieldBytes), kRelease, sizeof kRelease);
  return 0;
}

int64_t set_thread_pointer(uint64_t code, uint64_t address) {
  if (code != ARCH_SET_FS) return kInvalid;
  write_register(0xc0000100, address);
  return 0;
}

void load(const uint8_t* program) {
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(program);
  const auto* segments = reinterpret_cast<const Elf64_Phdr*>(program + header.e_phoff);
  for (int i = 0; i < header.e_phnum; ++i) {
    if (segments[i].p_type != PT_LOAD) continue;
    copy(reinterpret_cast<void*>(segments[i].p_vaddr), program + segments[i].p_offset, segments[i].p_filesz);
    heap_start = heap_end = round_up(segments[i].p_vaddr + segments[i].p_memsz);
  }
}

// The words that a program finds on its stack: arguments, environment, and what the kernel tells it.
uint64_t* lay_stack(const uint8_t* program, const char* environment) {
  static const char kProgramName[] = "program";
  static const uint8_t kRandom[16] = {1};
  const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(program);
  auto* const stack = reinterpret_cast<uint64_t*>(kStack - kPage);
  uint64_t* word = stack;
  *word++ = 1;
  *word++ = reinterpret_cast<uint64_t>(kProgramName);
  *word++ = 0;
  while (*environment != '\0') {
    *word++ = reinterpret_cast<uint64_t>(environment);
    while (*environment++ != '\0') {
    }
  }
  *word++ = 0;
  const uint64_t told[][2] = {{AT_PHDR, reinterpret_cast<uint64_t>(program) + header.e_phoff},
                              {AT_PHENT, header.e_phentsize},
                              {AT_PHNUM, header.e_phnum},
                              {AT_PAGESZ, kPage},
                              {AT_ENTRY, header.e_entry},
                              {AT_SECURE, 0},
                              {AT_RANDOM, reinterpret_cast<uint64_t>(kRandom)},
                              {AT_NULL, 0}};
  for (const auto& pair : told) {
    *word++ = pair[0];
    *word++ = pair[1];
  }
  return stack;
}

void catch_exceptions() {
  for (int i = 0; i < 32; ++i) {
    const uint64_t entry = reinterpret_cast<uint64_t>(exception_entries) + 16 * static_cast<uint64_t>(i);
    gates[i] = {static_cast<uint16_t>(entry),       kCode64, 0x8e00, static_cast<uint16_t>(entry >> 16),
                static_cast<uint32_t>(entry >> 32), 0};
  }
  const struct [[gnu::packed]] {
    uint16_t limit;
    uint64_t base;
  } pointer{sizeof gates - 1, reinterpret_cast<uint64_t>(gates)};
  asm volatile("lidt %0" : : "m"(pointer));
}

void take_system_calls() {
  write_register(0xc0000081, uint64_t{kCode64} << 32);                        // STAR
  write_register(0xc0000082, reinterpret_cast<uint64_t>(system_call_entry));  // LSTAR
  write_register(0xc0000084, 0x600);  // FMASK: interrupts and direction off
}

}  // namespace

int64_t system_call(int64_t number, uint64_t a, uint64_t b, uint64_t c) {
  switch (number) {
    case __NR_write:
      return write_text(b, c);
    case __NR_writev:
      return write_pieces(b, c);
    case __NR_brk:
      return set_heap_end(a);
    case __NR_mmap:
      return map_memory(b);
    case __NR_munmap:
    case __NR_mprotect:
    case __NR_futex:  // wakes: there is nobody who waits
      return 0;
    case __NR_uname:
      return name_system(a);
    case __NR_arch_prctl:
      return set_thread_pointer(a, b);
    case __NR_exit:
    case __NR_exit_group:
      exit_program(a);
    case __NR_kill:
    case __NR_tgkill:  // it aborts
      exit_program(128 + 6);
    default:
      return kNotSupported;
  }
}

void exception(uint64_t number, uint64_t error, uint64_t address) {
  print("\nexception ");
  print_number(number);
  print(" error ");
  print_number(error);
  print(" at ");
  print_number(address);
  print("\n");
  stop();
}

void kernel_main(const uint8_t* program, const char* environment) {
  start_serial();
  catch_exceptions();
  take_system_calls();
  load(program);
  const uint64_t* stack = lay_stack(program, environment);
  const uint64_t entry = reinterpret_cast<const Elf64_Ehdr*>(program)->e_entry;
  asm volatile("movq %0, %%rsp\n\txorl %%edx, %%edx\n\txorl %%ebp, %%ebp\n\tjmp *%1"
               :
               : "a"(stack), "c"(entry)
               : "memory");
  __builtin_unreachable();
}
