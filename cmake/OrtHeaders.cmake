# twinop_find_ort_headers(<variable>): the folder of onnxruntime_c_api.h.
#
# A custom-op library gets every function at run time, so headers are all that a build needs; those of any release
# from 1.18 serve every runtime. The first of these that has them wins:
#
#   1. ORT_ROOT: a release, unpacked or .tgz, or a folder in the layout of the sources or of Debian's package.
#      If it cannot be used, that is an error.
#   2. The cache: TWINOP_CACHE, else $XDG_CACHE_HOME/twinop, else ~/.cache/twinop.
#   3. The release tarball, its SHA-256 checked, from TWINOP_ORT_URL if it is set: a mirror (the folder of
#      v<version>/<file>). The headers are the same for every architecture.
#   4. Debian's libonnxruntime-dev, unpacked but not installed.
#
# `cmake -P cmake/OrtHeaders.cmake` prints the folder. The variables are environment variables.

set(TWINOP_ORT_PINNED 1.23.2)
set(TWINOP_ORT_OLDEST_API 18)
if(NOT TWINOP_ORT_SHA256)  # the tests have their own, and an /etc/apt
  set(TWINOP_ORT_SHA256 2083e361072a79ce16a90dcd5f5cb3ab92574a82a3ce0ac01e5cfa3158176f53)
  set(TWINOP_APT_ETC /etc/apt)
endif()

function(twinop_find_ort_headers result)
  set(cache "$ENV{HOME}/.cache/twinop")
  if(NOT "$ENV{TWINOP_CACHE}" STREQUAL "")
    string(REGEX REPLACE "^~/" "$ENV{HOME}/" cache "$ENV{TWINOP_CACHE}")
  elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(cache "$ENV{XDG_CACHE_HOME}/twinop")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" -E make_directory "${cache}" ERROR_QUIET)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E touch "${cache}/lock" RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "The cache folder ${cache} cannot be written. Set TWINOP_CACHE to a folder that you may write.")
  endif()
  file(LOCK "${cache}/lock" GUARD FUNCTION TIMEOUT 600)  # two builds, one download
  if(NOT "$ENV{ORT_ROOT}" STREQUAL "")
    _twinop_ort_root("${cache}" include)
  else()
    _twinop_ort_fetch("${cache}" include)
  endif()
  file(STRINGS "${include}/onnxruntime_c_api.h" api REGEX "^[ \t]*#[ \t]*define[ \t]+ORT_API_VERSION[ \t]+[0-9]+")
  string(REGEX MATCH "[0-9]+" api "${api}")
  if(NOT api GREATER_EQUAL TWINOP_ORT_OLDEST_API)
    message(FATAL_ERROR "${include}: the headers declare API '${api}'; twinop needs API ${TWINOP_ORT_OLDEST_API} (release "
                        "1.${TWINOP_ORT_OLDEST_API}) or later. Use release ${TWINOP_ORT_PINNED}, or unset ORT_ROOT: then "
                        "the headers are fetched.")
  endif()
  message(STATUS "ONNX Runtime headers: API ${api}, ${include}")
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

# The folder of the header below `root`, or `...-NOTFOUND`: a release, Debian's package (/usr, or unpacked), the sources.
function(_twinop_ort_include root result)
  unset(include)  # the caller's
  find_path(include onnxruntime_c_api.h PATHS "${root}" NO_DEFAULT_PATH NO_CACHE
            PATH_SUFFIXES include include/onnxruntime include/onnxruntime/core/session usr/include/onnxruntime)
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

# Puts the headers of a tarball into `folder`, by a rename at the end: an interrupted run leaves no half of them.
function(_twinop_ort_unpack tarball folder result)
  set(work "${folder}.new")
  file(REMOVE_RECURSE "${work}" "${folder}")
  file(MAKE_DIRECTORY "${work}")
  execute_process(COMMAND "${CMAKE_COMMAND}" -E tar xf "${tarball}" "*.h" WORKING_DIRECTORY "${work}"
                  RESULT_VARIABLE failed ERROR_QUIET)
  file(GLOB_RECURSE header "${work}/onnxruntime_c_api.h")
  if(header AND NOT failed)
    get_filename_component(include "${header}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    file(RENAME "${include}" "${folder}/include")
  endif()
  file(REMOVE_RECURSE "${work}")
  _twinop_ort_include("${folder}" include)
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

function(_twinop_ort_root cache result)
  set(advice "Correct the path, or unset ORT_ROOT: then the headers are fetched.")
  string(REGEX REPLACE "^~/" "$ENV{HOME}/" root "$ENV{ORT_ROOT}")
  get_filename_component(root "${root}" ABSOLUTE)
  if(NOT EXISTS "${root}")
    message(FATAL_ERROR "ORT_ROOT=$ENV{ORT_ROOT} does not exist. Expected an unpacked ONNX Runtime release or its .tgz. "
                        "${advice}")
  elseif(IS_DIRECTORY "${root}")
    _twinop_ort_include("${root}" include)
  else()
    file(SHA256 "${root}" digest)  # another file of the same name has another place in the cache
    _twinop_ort_include("${cache}/ort-${digest}" include)
    if(NOT include)
      _twinop_ort_unpack("${root}" "${cache}/ort-${digest}" include)
    endif()
  endif()
  if(NOT include)
    message(FATAL_ERROR "ORT_ROOT=$ENV{ORT_ROOT} has no onnxruntime_c_api.h, or is not a complete tarball. Expected "
                        "include/onnxruntime_c_api.h in it, as in onnxruntime-linux-x64-gpu-${TWINOP_ORT_PINNED}.tgz; the "
                        "Python packages have no headers. ${advice}")
  endif()
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

function(_twinop_ort_fetch cache result)
  foreach(folder "ort-${TWINOP_ORT_PINNED}" ort-debian)
    _twinop_ort_include("${cache}/${folder}" include)
    if(include)
      set(${result} "${include}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(site "$ENV{TWINOP_ORT_URL}")
  if(NOT site)
    set(site https://github.com/microsoft/onnxruntime/releases/download)
  endif()
  set(url "${site}/v${TWINOP_ORT_PINNED}/onnxruntime-linux-x64-gpu-${TWINOP_ORT_PINNED}.tgz")
  set(tarball "${cache}/release.tgz")
  message(STATUS "ONNX Runtime headers: downloading ${url}")
  file(DOWNLOAD "${url}" "${tarball}" STATUS status INACTIVITY_TIMEOUT 5)  # EXPECTED_HASH ends CMake here
  list(POP_FRONT status code)
  file(SHA256 "${tarball}" actual)
  set(tried "${url}: ${status}")
  if(NOT code AND NOT actual STREQUAL TWINOP_ORT_SHA256)
    set(tried "${url}: refused and removed: its SHA-256 is ${actual}, expected ${TWINOP_ORT_SHA256}")
  elseif(NOT code)
    _twinop_ort_unpack("${tarball}" "${cache}/ort-${TWINOP_ORT_PINNED}" include)
  endif()
  file(REMOVE "${tarball}")
  if(NOT include)
    message(STATUS "ONNX Runtime headers: ${tried}; trying Debian's libonnxruntime-dev")
    _twinop_ort_debian("${cache}" include debian)
  endif()
  if(NOT include)
    message(FATAL_ERROR "No ONNX Runtime headers found.\n  ${tried}\n  Debian's libonnxruntime-dev: ${debian}\nRun again "
                        "with network access; or download ${url} on another machine and set ORT_ROOT to the file; or "
                        "install libonnxruntime-dev (Debian 13 or later) and set ORT_ROOT=/usr.")
  endif()
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

# Downloads the package of Debian 13 through the machine's own mirror; nothing is installed, root is not needed.
function(_twinop_ort_debian cache result error)
  set(${error} "this machine has no apt-get with a Debian mirror" PARENT_SCOPE)
  file(GLOB sources ${TWINOP_APT_ETC}/sources.list ${TWINOP_APT_ETC}/sources.list.d/*)
  foreach(file IN LISTS sources)
    file(STRINGS "${file}" lines REGEX "^[^#]*https?://[^ ]+/debian/?( |$)")
    list(APPEND mirrors ${lines})
  endforeach()
  string(REGEX MATCH "https?://[^ ;]+/debian/?" mirror "${mirrors}")
  find_program(TWINOP_APT_GET apt-get)
  if(NOT TWINOP_APT_GET OR NOT mirror)
    return()
  endif()
  set(work "${cache}/apt")
  file(REMOVE_RECURSE "${work}")
  file(MAKE_DIRECTORY "${work}/lists/partial" "${work}/cache/archives/partial" "${work}/parts")
  file(GLOB keyring /usr/share/keyrings/debian-archive-keyring.gpg)
  if(keyring)
    set(options "[signed-by=${keyring}] ")
  endif()
  file(WRITE "${work}/sources.list" "deb ${options}${mirror} trixie main\n")
  # Read after the machine's own configuration, whose hooks may need root.
  file(WRITE "${work}/apt.conf"
       "Dir::Etc::sourcelist \"${work}/sources.list\";\nDir::Etc::sourceparts \"${work}/parts\";\n"
       "Dir::State::Lists \"${work}/lists\";\nDir::Cache \"${work}/cache\";\nAPT::Sandbox::User \"root\";\n"
       "APT::Update::Error-Mode \"any\";\nAcquire::Languages \"none\";\nAcquire::http::Timeout \"10\";\n"
       "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n")
  foreach(command update "download;libonnxruntime-dev")
    execute_process(COMMAND "${TWINOP_APT_GET}" -qq -c "${work}/apt.conf" ${command} WORKING_DIRECTORY "${work}"
                    ERROR_VARIABLE reason OUTPUT_QUIET TIMEOUT 300)
    string(APPEND reasons "${reason}")
  endforeach()
  file(GLOB package "${work}/libonnxruntime-dev_*.deb")
  if(package)
    execute_process(COMMAND dpkg -x "${package}" "${work}/unpacked" ERROR_QUIET)
  endif()
  _twinop_ort_include("${work}/unpacked" include)
  if(include)
    file(MAKE_DIRECTORY "${cache}/ort-debian")
    file(RENAME "${include}" "${cache}/ort-debian/include")
    set(include "${cache}/ort-debian/include")
  endif()
  file(REMOVE_RECURSE "${work}")
  string(REGEX MATCH "E: [^\n]*" reason "${reasons}")
  set(${error} "apt-get could not fetch it from ${mirror}: ${reason}" PARENT_SCOPE)
  set(${result} "${include}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  twinop_find_ort_headers(include)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${include}")
endif()
