# The XLA FFI headers of the oldest supported jaxlib. XLA accepts a module whose FFI version is at most its own, so a module built against
# the oldest headers loads everywhere and one built against newer headers does not. They are not in this repository: the build
# requirement jaxlib==0.11.2 brings them, and where another jaxlib is installed they are downloaded once.
set(MOEJAX_OLDEST_JAXLIB 0.11.2)
set(MOEJAX_OLDEST_FFI_API 4)  # minor version; the major version is 0

function(moejax_ffi_api variable include_dir)
  set(header ${include_dir}/xla/ffi/api/c_api.h)
  set(minor "")
  if(EXISTS ${header})
    file(STRINGS ${header} line REGEX "define XLA_FFI_API_MINOR [0-9]+")
    string(REGEX MATCH "[0-9]+$" minor "${line}")
  endif()
  set(${variable} "${minor}" PARENT_SCOPE)
endfunction()

set(MOEJAX_XLA_INCLUDE "" CACHE PATH "Folder that holds xla/ffi/api of jaxlib ${MOEJAX_OLDEST_JAXLIB}; empty: found or downloaded")
set(xla_include ${MOEJAX_XLA_INCLUDE})
if(NOT xla_include)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('jaxlib'); print(list(s.submodule_search_locations)[0] + '/include' if s else '')"
    OUTPUT_VARIABLE xla_include OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  moejax_ffi_api(api "${xla_include}")
  if(NOT api STREQUAL MOEJAX_OLDEST_FFI_API)
    set(xla_include ${CMAKE_BINARY_DIR}/jaxlib-${MOEJAX_OLDEST_JAXLIB}/jaxlib/include)
    if(NOT EXISTS ${xla_include})
      message(STATUS "Downloading the FFI headers of jaxlib ${MOEJAX_OLDEST_JAXLIB}")
      set(wheels ${CMAKE_BINARY_DIR}/wheels)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -m pip download --quiet --no-deps --only-binary :all: --dest ${wheels} jaxlib==${MOEJAX_OLDEST_JAXLIB}
        RESULT_VARIABLE failed)
      file(GLOB wheel ${wheels}/jaxlib-${MOEJAX_OLDEST_JAXLIB}-*.whl)
      if(failed OR NOT wheel)
        message(FATAL_ERROR "moejax: no FFI headers of jaxlib ${MOEJAX_OLDEST_JAXLIB}: install it into the build environment, or set "
                            "MOEJAX_XLA_INCLUDE to the include folder of that version")
      endif()
      file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${CMAKE_BINARY_DIR}/jaxlib-${MOEJAX_OLDEST_JAXLIB} PATTERNS "jaxlib/include/*")
      file(REMOVE_RECURSE ${wheels})
    endif()
  endif()
endif()
moejax_ffi_api(api "${xla_include}")
if(NOT api STREQUAL MOEJAX_OLDEST_FFI_API)
  message(FATAL_ERROR "moejax: the FFI headers in ${xla_include} have version 0.${api}; expected 0.${MOEJAX_OLDEST_FFI_API}, of jaxlib "
                      "${MOEJAX_OLDEST_JAXLIB}: a module built against newer ones is refused by the oldest supported jaxlib")
endif()
message(STATUS "XLA FFI 0.${api} headers: ${xla_include}")
add_library(xla_ffi INTERFACE)
target_include_directories(xla_ffi SYSTEM INTERFACE ${xla_include})
