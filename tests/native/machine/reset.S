// From the reset vector of an x86 CPU to kernel_main: 64-bit mode, memory as it is, and the state that AVX needs
// switched on. Defines too what the CPU enters the kernel by: system calls and exceptions.

  .set CODE32, 0x08
  .set DATA, 0x10
  .set CODE64, 0x18  // followed by data, as SYSCALL wants it
  .set TABLES, 0x1000
  .set STACK, 0x90000

  .section .program, "a"
program:
  .incbin "program"
  .balign 8
environment:
  .incbin "environment"

  .section .reset, "ax"
  .code16
real_mode:
  cli
  lgdtl %cs:(gdt_pointer - real_mode + 0xf000)
  movl %cr0, %eax
  orb $1, %al
  movl %eax, %cr0
  ljmpl $CODE32, $protected_mode

  .code32
protected_mode:
  movl $DATA, %eax
  movl %eax, %ds
  movl %eax, %es
  movl %eax, %ss
  // Four pages of 1 GiB: every address is its own.
  movl $(TABLES + 0x1003), TABLES
  movl $0x00000083, TABLES + 0x1000
  movl $0x40000083, TABLES + 0x1008
  movl $0x80000083, TABLES + 0x1010
  movl $0xc0000083, TABLES + 0x1018
  movl $TABLES, %eax
  movl %eax, %cr3
  movl $0x00040620, %eax  // OSXSAVE, OSXMMEXCPT, OSFXSR, PAE
  movl %eax, %cr4
  movl $0xc0000080, %ecx  // EFER
  rdmsr
  orl $0x101, %eax  // LME, SCE
  wrmsr
  movl $0x80000023, %eax  // PG, NE, MP, PE
  movl %eax, %cr0
  ljmpl $CODE64, $long_mode

  .code64
long_mode:
  xorl %ecx, %ecx
  xorl %edx, %edx
  movl $7, %eax  // x87, SSE, AVX
  xsetbv
  fninit
  movl $kernel_in_rom, %esi
  movl $kernel_start, %edi
  movl $kernel_end, %ecx
  subl %edi, %ecx
  cld
  rep movsb
  movl $STACK, %esp
  movl $program, %edi
  movl $environment, %esi
  movl $kernel_main, %eax
  call *%rax

  .balign 8
gdt:
  .quad 0
  .quad 0x00cf9a000000ffff
  .quad 0x00cf92000000ffff
  .quad 0x00af9a000000ffff
  .quad 0x00cf92000000ffff
gdt_pointer:
  .word . - gdt - 1
  .long gdt

  .org 0xff0
  .code16
  .global reset
reset:
  jmp real_mode
  .org 0x1000

  .text
  .code64
  .global system_call_entry
system_call_entry:  // of a program in ring 0: rcx is where it goes on, r11 its flags
  movq %rsp, program_stack(%rip)
  movl $STACK, %esp
  pushq %rcx
  pushq %r11
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %r8
  pushq %r9
  pushq %r10
  movq %rdx, %rcx
  movq %rsi, %rdx
  movq %rdi, %rsi
  movq %rax, %rdi
  call system_call
  popq %r10
  popq %r9
  popq %r8
  popq %rdx
  popq %rsi
  popq %rdi
  popq %r11
  popq %rcx
  pushq %r11
  popfq
  movq program_stack(%rip), %rsp
  jmp *%rcx

  // One entry for each exception, 16 bytes apart.
  .global exception_entries
  .balign 16
exception_entries:
  .set number, 0
  .rept 32
  .balign 16
  .if number != 8 && number != 10 && number != 11 && number != 12 && number != 13 && number != 14 && number != 17
  pushq $0  // the CPU pushes no error code
  .endif
  pushq $number
  jmp exception_entry
  .set number, number + 1
  .endr

exception_entry:
  popq %rdi
  popq %rsi
  movq (%rsp), %rdx
  call exception

  .bss
  .balign 8
program_stack:
  .quad 0

  .section .note.GNU-stack, "", @progbits
