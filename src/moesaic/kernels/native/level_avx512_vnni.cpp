#define MOESAIC_LEVEL_AVX2
#define MOESAIC_LEVEL_AVX512
#define MOESAIC_LEVEL_AVX512_VNNI
#define MOESAIC_LEVEL_TABLE avx512_vnni_level
#include "level.inc"
