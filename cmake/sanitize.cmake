# HEADRACE_SANITIZE: instruments every target below; the library, its tests and the tool must agree, so it is global.
if(HEADRACE_SANITIZE)
    if(NOT HEADRACE_SANITIZE MATCHES "^(address,undefined|address|undefined|thread)$")
        message(FATAL_ERROR "HEADRACE_SANITIZE: expected address,undefined or thread, got ${HEADRACE_SANITIZE}")
    endif()
    add_compile_options(-fsanitize=${HEADRACE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${HEADRACE_SANITIZE})
endif()
