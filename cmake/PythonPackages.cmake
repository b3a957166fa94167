# Finds nanobind and OpenBLAS, which come as Python packages, through the interpreter that builds us.

# moejax_package_dir(<variable> <module>): the folder of an installed package, or an error that says what to install.
function(moejax_package_dir variable module requirement)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('${module}'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT folder)
    message(FATAL_ERROR "moejax: ${Python_EXECUTABLE} has no ${module}: pip install ${requirement}")
  endif()
  file(TO_CMAKE_PATH "${folder}" folder)
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()

moejax_package_dir(nanobind_package nanobind "nanobind")
find_package(nanobind CONFIG REQUIRED PATHS ${nanobind_package}/cmake NO_DEFAULT_PATH)

# OpenBLAS: a library with kernels for every x86-64 and Arm processor, chosen when it loads. It is installed beside our module, so that
# nothing has to be found at run time.
moejax_package_dir(openblas_package scipy_openblas32 "scipy-openblas32")
find_library(MOEJAX_OPENBLAS NAMES scipy_openblas PATHS ${openblas_package}/lib NO_DEFAULT_PATH REQUIRED)
add_library(openblas SHARED IMPORTED)
set_target_properties(openblas PROPERTIES IMPORTED_LOCATION ${MOEJAX_OPENBLAS}
  INTERFACE_INCLUDE_DIRECTORIES ${openblas_package}/include)
