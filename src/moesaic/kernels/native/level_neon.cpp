#define MOESAIC_LEVEL_NEON
#define MOESAIC_LEVEL_TABLE neon_level
#include "level.inc"
