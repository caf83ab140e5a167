#pragma once

// Marks what liborlop exports; everything else in the library is hidden.
#define ORLOP_EXPORT __attribute__((visibility("default")))
