# Installs the build tree into a fresh prefix, builds the consumer project against it, runs it.
#   cmake -D BUILD_DIR= -D SOURCE_DIR= -D WORK_DIR= -D CXX= -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
set(prefix ${WORK_DIR}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build -G Ninja -D CMAKE_PREFIX_PATH=${prefix}
    -D CMAKE_CXX_COMPILER=${CXX} -D "CMAKE_CXX_FLAGS=-Wall -Wextra -Werror -Wconversion")
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/make_inputs ${WORK_DIR}/inputs)
run(${WORK_DIR}/build/finetune ${WORK_DIR}/inputs/model ${WORK_DIR}/inputs/data.tok ${WORK_DIR}/hf)
foreach(name config.json model.safetensors)
  if(NOT EXISTS ${WORK_DIR}/hf/${name})
    message(FATAL_ERROR "the consumer's export lacks ${name}")
  endif()
endforeach()

# Bad input ends with the documented exit code and one line.
execute_process(COMMAND ${WORK_DIR}/build/finetune ${WORK_DIR}/inputs ${WORK_DIR}/inputs/data.tok
                        ${WORK_DIR}/hf2
                RESULT_VARIABLE code ERROR_VARIABLE message)
if(NOT code EQUAL 4 OR NOT message MATCHES "config.json")
  message(FATAL_ERROR "a folder without config.json: exit code ${code}, message: ${message}")
endif()
