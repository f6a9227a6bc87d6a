// For the files that are compiled once for each ISA level an op has a kernel for: <op>/kernels.cc, or <op>/<level>.cc
// where a level has a kernel of its own. CMakeLists.txt says which, with the level's flags, and defines
//
//   TILEWRIGHT_LEVEL      its name
//   TILEWRIGHT_VEC        the header of its Vec (base/vec)
//   TILEWRIGHT_QUADS      the header of its products of bytes (base/quads)
//   TILEWRIGHT_BYTES, TILEWRIGHT_COMPARE, TILEWRIGHT_LOOPS   headers of image, sample, probe for the same vectors
//
// All that such a file gives to the linker is its table of kernels: anything else would be a symbol that carries the
// instructions of whichever level the linker picks. tests/test_symbols.py looks.
#pragma once

#define TILEWRIGHT_PASTE_(op, level) op##_##level
#define TILEWRIGHT_PASTE(op, level) TILEWRIGHT_PASTE_(op, level)

// The table of `op` at this level, of type `Kernels`: TILEWRIGHT_KERNELS(norm, NormKernels) = {...};
#define TILEWRIGHT_KERNELS(op, Kernels)                        \
  extern const Kernels TILEWRIGHT_PASTE(op, TILEWRIGHT_LEVEL); \
  const Kernels TILEWRIGHT_PASTE(op, TILEWRIGHT_LEVEL)
