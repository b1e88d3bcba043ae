/* Loads the kernel library without a file on disk: an anonymous memory file, which the dynamic linker opens by its
 * /proc path. */
#include "loader.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { MACHINE = EM_X86_64, ELF_CLASS = ELFCLASS64 };
#elif defined(__i386__)
enum { MACHINE = EM_386, ELF_CLASS = ELFCLASS32 };
#elif defined(__aarch64__)
enum { MACHINE = EM_AARCH64, ELF_CLASS = ELFCLASS64 };
#elif defined(__arm__)
enum { MACHINE = EM_ARM, ELF_CLASS = ELFCLASS32 };
#elif defined(__riscv)
enum { MACHINE = EM_RISCV, ELF_CLASS = __riscv_xlen == 64 ? ELFCLASS64 : ELFCLASS32 };
#else
#error "add this machine's ELF number"
#endif

static const char *machine_name(unsigned machine) {
  static const struct {
    unsigned machine;
    const char *name;
  } NAMES[] = {{EM_X86_64, "x86-64"}, {EM_386, "x86"}, {EM_AARCH64, "aarch64"}, {EM_ARM, "arm"}, {EM_RISCV, "riscv"}};
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
    if (NAMES[i].machine == machine)
      return NAMES[i].name;
  return "another machine";
}

coda_code coda_library_check(const coda_section *section, coda_error *error) {
  const uint8_t *elf = section->data;
  if (!section->size)
    return CODA_OK;
  if (section->size < EI_NIDENT + 4 || memcmp(elf, ELFMAG, SELFMAG) != 0)
    return coda_fail(error, CODA_ERROR_BUNDLE, "bundle's kernel library is not an ELF file");
  const unsigned machine =
      elf[EI_DATA] == ELFDATA2MSB ? (unsigned)elf[18] << 8 | elf[19] : (unsigned)elf[19] << 8 | elf[18];
  if (machine != MACHINE || elf[EI_CLASS] != ELF_CLASS)
    return coda_fail(error, CODA_ERROR_TARGET,
                     "bundle's kernels are for %s, this machine is %s: build the bundle for this target",
                     machine_name(machine), machine_name(MACHINE));
  return CODA_OK;
}

static int write_all(int file, const uint8_t *data, size_t size) {
  while (size) {
    ssize_t n = write(file, data, size);
    if (n < 0 && errno == EINTR)
      continue;
    if (n <= 0)
      return -1;
    data += n;
    size -= (size_t)n;
  }
  return 0;
}

coda_code coda_library_open(coda_library *library, const coda_section *section, coda_error *error) {
  char path[32];
  *library = CODA_LIBRARY_NONE;
  coda_code code = coda_library_check(section, error);
  if (code)
    return code;
  library->file = memfd_create("coda-kernels", MFD_CLOEXEC);
  if (library->file < 0 || write_all(library->file, section->data, section->size)) {
    code = coda_fail(error, CODA_ERROR_TARGET, "kernels cannot be put into a memory file: %s", strerror(errno));
    coda_library_close(library);
    return code;
  }
  snprintf(path, sizeof path, "/proc/self/fd/%d", library->file);
  library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library->handle) {
    const char *reason = dlerror();
    code = coda_fail(error, CODA_ERROR_TARGET, "kernels cannot be loaded: %s",
                     reason ? reason : "the dynamic linker gives no reason");
    coda_library_close(library);
  }
  return code;
}

coda_kernel coda_library_kernel(const coda_library *library, const char *name) {
  void *symbol = dlsym(library->handle, name);
  coda_kernel kernel = NULL;
  memcpy(&kernel, &symbol, sizeof kernel); /* ISO C has no cast from object to function pointer */
  return kernel;
}

/* The file stays open as long as the library: the dynamic linker knows a library by its path, and a reused descriptor
 * number would give it the old one. */
void coda_library_close(coda_library *library) {
  if (library->handle)
    dlclose(library->handle);
  if (library->file >= 0)
    close(library->file);
  *library = CODA_LIBRARY_NONE;
}
