// Which of the levels that were built this machine has.
#if defined(MOESAIC_ARM64) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.hpp"

namespace moesaic {

std::vector<const LevelTable*> levels_here() {
  std::vector<const LevelTable*> found{&portable_level()};
#if defined(MOESAIC_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return found;
  found.push_back(&avx2_level());
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return found;
  found.push_back(&avx512_level());
  if (!__builtin_cpu_supports("avx512vnni")) return found;
  found.push_back(&avx512_vnni_level());
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16_level());
#elif defined(MOESAIC_ARM64)
  found.push_back(&neon_level());
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&neon_dotprod_level());
#endif
#endif
  return found;
}

}  // namespace moesaic
