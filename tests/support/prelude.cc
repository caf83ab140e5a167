// The translation unit that precompiled headers belong to.
#include "tests/support/prelude.h"
