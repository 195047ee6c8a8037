#define MOESAIC_LEVEL_AVX2
#define MOESAIC_LEVEL_AVX512
#define MOESAIC_LEVEL_TABLE avx512_level
#include "level.inc"
