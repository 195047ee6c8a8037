#define MOESAIC_LEVEL_NEON
#define MOESAIC_LEVEL_NEON_DOTPROD
#define MOESAIC_LEVEL_TABLE neon_dotprod_level
#include "level.inc"
