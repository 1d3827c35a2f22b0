// Entry from Python: binds the buffers, runs the grid, and turns faults of the kernel into messages.
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "memory.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace emulator {

namespace {

constexpr uint64_t HANDLER_STACK = 64 << 10;
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr int FAULT_COUNT = sizeof FAULTS / sizeof *FAULTS;

// What clang's instrumentation says by the instruction that stops a kernel: ud1 with a number.
const char* undefined(const uint8_t* code) {
  const bool stops = code[0] == 0x67 && code[1] == 0x0f && code[2] == 0xb9;
  switch (!stops ? 0xff : code[3] == 0x40 ? code[4] : code[3]) {
    case 0:
    case 12:
    case 13:
    case 21:
      return "a signed integer overflowed";
    case 3:
      return "an integer divided by zero";
    case 18:
      return "an index outside of an array";
    case 19:
      return "a pointer overflowed";
    case 20:
      return "a shift by more bits than there are";
    case 22:
      return "an address that is not aligned for its type";
    default:
      return "came to code that cannot be reached";
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  current->code = uint64_t(registers[REG_RIP]) - current->library;
  if (signal == SIGVTALRM)
    fail(TIME, "%s: no end after %g s of computing; %s", current->name, current->seconds, place());
  if (signal == SIGFPE) fail(UNDEFINED, "%s: an integer divided by zero", place());
  if (signal == SIGILL)
    fail(UNDEFINED, "%s: %s", place(), undefined(reinterpret_cast<const uint8_t*>(registers[REG_RIP])));
  char where[512];
  explain_address(reinterpret_cast<uint64_t>(info->si_addr), where, sizeof where);
  const bool wrote = registers[REG_ERR] & 2;
  fail(OUT_OF_BOUNDS, "%s %s %s", place(), wrote ? "wrote" : "read", where);
}

struct Signals {
  struct sigaction before[FAULT_COUNT];
  stack_t stack_before;
  timer_t timer;

  Signals() {
    static void* stack = mmap(nullptr, HANDLER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t own = {stack, 0, HANDLER_STACK};
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < FAULT_COUNT; ++i) sigaction(FAULTS[i], &action, &before[i]);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event.sigev_notify_thread_id = int(syscall(SYS_gettid));
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    const double whole = floor(current->seconds);
    const itimerspec limit = {{0, 0}, {long(whole), long((current->seconds - whole) * 1e9)}};
    timer_settime(timer, 0, &limit, nullptr);
  }
  ~Signals() {
    timer_delete(timer);
    for (int i = 0; i < FAULT_COUNT; ++i) sigaction(FAULTS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

}  // namespace

extern "C" int emulator_dispatch(Dispatch* dispatch) {
  current = dispatch;
  dispatch->threadgroup_bytes = dispatch->code = dispatch->code_before = 0;
  Dl_info info;
  dladdr(reinterpret_cast<void*>(dispatch->kernel), &info);
  dispatch->library = reinterpret_cast<uint64_t>(info.dli_fbase);
  void* pointers[BUFFERS];
  bind_memory(pointers);
  begin_checks();
  int failure;
  {
    Signals signals;
    failure = run_guarded(pointers);
  }
  end_checks();
  unbind_memory(failure == NONE);
  current = nullptr;
  return failure;
}

// Clang calls it for float to bfloat: to nearest, ties to even. Debian 12's libgcc has it not.
extern "C" __bf16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t upper = uint16_t(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  __bf16 result;
  memcpy(&result, &upper, sizeof result);
  return result;
}

}  // namespace emulator
