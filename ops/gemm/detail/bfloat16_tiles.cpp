#include <atomic>

#include <mica/ops/gemm/detail/bfloat16_tiles.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mica::gemm {

namespace x86 {  // bfloat16_tiles_x86.cpp

bool compiled();
void pack_tiles(const Vectors& vectors, bool as_pairs, BFloat16* out);
void pack_tiles(const FloatVectors& vectors, bool as_pairs, BFloat16* out);
void begin_amx();
void end_amx();
void multiply_amx(const TileBlock& block);
void multiply_split_amx(const TileBlock& block);
void multiply_avx512(const TileBlock& block);

}  // namespace x86

namespace {

#if defined(__x86_64__) && defined(__linux__)

// Whether the operating system saves these parts of a thread's state (Intel's manual, volume 1, section 13.3).
bool saves(unsigned mask) {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

// Linux enables the AMX state on request (Documentation/arch/x86/xstate.rst).
bool amx_is_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Bfloat16Unit found() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!x86::compiled() || __get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 27)) == 0) {
    return Bfloat16Unit::none;
  }
  constexpr unsigned kAvx512State = 0xe6, kTileState = 0x60000;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  const bool foundation = (b & (1u << 16)) != 0, bytes_and_words = (b & (1u << 30)) != 0,
             lengths = (b & (1u << 31)) != 0;
  const bool has_amx = (d & (1u << 22)) != 0 && (d & (1u << 24)) != 0;
  unsigned subleaf = 0;
  __get_cpuid_count(7, 1, &subleaf, &b, &c, &d);
  const bool dot_product = (subleaf & (1u << 5)) != 0;
  if (!foundation || !bytes_and_words || !lengths || !dot_product || !saves(kAvx512State)) {
    return Bfloat16Unit::none;
  }
  return has_amx && saves(kTileState) && amx_is_permitted() ? Bfloat16Unit::amx : Bfloat16Unit::avx512;
}

#else

Bfloat16Unit found() { return Bfloat16Unit::none; }

#endif

std::atomic<Bfloat16Unit> limit{Bfloat16Unit::amx};

}  // namespace

Bfloat16Unit bfloat16_unit() {
  static const Bfloat16Unit best = found();
  const Bfloat16Unit most = limit.load(std::memory_order_relaxed);
  return best < most ? best : most;
}

void limit_bfloat16_unit(Bfloat16Unit most) { limit.store(most, std::memory_order_relaxed); }

void pack_tiles(const Vectors& vectors, bool as_pairs, BFloat16* out) { x86::pack_tiles(vectors, as_pairs, out); }
void pack_tiles(const FloatVectors& vectors, bool as_pairs, BFloat16* out) { x86::pack_tiles(vectors, as_pairs, out); }

TileSession::TileSession() : unit_(bfloat16_unit()) {
  if (unit_ == Bfloat16Unit::amx) {
    x86::begin_amx();
  }
}

TileSession::~TileSession() {
  if (unit_ == Bfloat16Unit::amx) {
    x86::end_amx();
  }
}

void multiply_tiles(const TileSession& session, const TileBlock& block) {
  if (block.split) {
    x86::multiply_split_amx(block);
  } else {
    session.unit() == Bfloat16Unit::amx ? x86::multiply_amx(block) : x86::multiply_avx512(block);
  }
}

}  // namespace mica::gemm
