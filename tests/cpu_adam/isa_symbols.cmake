# cmake -DNM=nm -DARCHIVE=liborlop_cpu_adam.a -P isa_symbols.cmake
# A file of an instruction set defines its table and nothing else that a linker could share: an inline
# function compiled for AVX-512 and kept for everybody would crash on other processors.
execute_process(COMMAND ${NM} --defined-only --extern-only ${ARCHIVE}
                OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
foreach(set avx2:kAvx2Kernels avx512:kAvx512Kernels)
  string(REPLACE ":" ";" pair ${set})
  list(GET pair 0 file)
  list(GET pair 1 table)
  string(REGEX MATCH "adam_${file}\\.cc\\.o:\n([^\n]+\n)*" member "${listing}")
  string(REGEX MATCHALL "[^\n]+\n" symbols "${member}")
  list(LENGTH symbols lines)  # the member's name and one symbol
  if(NOT lines EQUAL 2 OR NOT member MATCHES "${table}")
    message(FATAL_ERROR "adam_${file}.cc must define ${table} alone, but defines:\n${member}")
  endif()
endforeach()
