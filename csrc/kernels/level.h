// For files that are compiled once for each ISA level of an op: <op>/kernels.cc, or <op>/<level>.cc if a level has its
// own kernel. CMakeLists.txt lists them with the level's flags, and defines
//
//   TILEWRIGHT_LEVEL      its name
//   TILEWRIGHT_VEC        the header of its Vec (base/vec)
//   TILEWRIGHT_QUADS      the header of its products of bytes (base/quads)
//   TILEWRIGHT_BYTES, TILEWRIGHT_COMPARE, TILEWRIGHT_LOOPS   headers of image, sample, probe for the same vectors
//
// Such a file exports only its table of kernels: any other symbol would carry the instructions of whichever level the
// linker picks. tests/test_symbols.py checks this.
#pragma once

#define TILEWRIGHT_PASTE_(op, level) op##_##level
#define TILEWRIGHT_PASTE(op, level) TILEWRIGHT_PASTE_(op, level)

// The table of `op` at this level, of type `Kernels`: TILEWRIGHT_KERNELS(norm, NormKernels) = {...};
#define TILEWRIGHT_KERNELS(op, Kernels)                        \
  extern const Kernels TILEWRIGHT_PASTE(op, TILEWRIGHT_LEVEL); \
  const Kernels TILEWRIGHT_PASTE(op, TILEWRIGHT_LEVEL)
