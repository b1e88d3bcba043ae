/* Bundles for models that came without one: `python -m coda_edge.onnxruntime.compile` makes them, once, into a cache.
 *
 * Python is the one that this process runs in, or the one that the option 'python' names. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "provider.h"

extern char **environ;

enum { HEX_BYTES = 65, LINE_BYTES = 400 };

/* The executable of the Python in this process, in new memory; NULL if there is none. */
static char *running_python(void) {
  int (*initialized)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  int (*lock)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  void (*unlock)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  void *(*variable)(const char *) = (void *(*)(const char *))dlsym(RTLD_DEFAULT, "PySys_GetObject");
  const char *(*text)(void *) = (const char *(*)(void *))dlsym(RTLD_DEFAULT, "PyUnicode_AsUTF8");
  if (!initialized || !lock || !unlock || !variable || !text || !initialized())
    return NULL;
  const int state = lock();
  void *object = variable("executable");
  const char *found = object ? text(object) : NULL;
  char *result = found && *found ? strdup(found) : NULL;
  unlock(state);
  return result;
}

/* Makes all folders of a path that ends in one. */
static bool make_folders(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(path, 0777);
    *slash = '/';
  }
  struct stat info;
  return (mkdir(path, 0777) == 0 || errno == EEXIST) && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* The cache's folder (XDG Base Directory Specification), in new memory; NULL if there is none. */
static char *cache_folder(const provider *p) {
  const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  char *folder = NULL;
  if (p->settings.cache)
    folder = strdup(p->settings.cache);
  else if (base && *base == '/')
    folder = text_new("%s/coda-edge/bundles", base);
  else if (home && *home)
    folder = text_new("%s/.cache/coda-edge/bundles", home);
  if (folder && make_folders(folder))
    return folder;
  tell(p, ORT_LOG_WARNING,
       "no bundle is compiled: the cache's folder '%s' cannot be made; name one in the option "
       "'cache'",
       folder ? folder : "");
  free(folder);
  return NULL;
}

/* The last line of a file that says something. */
static void last_line(const char *path, char line[LINE_BYTES]) {
  FILE *file = fopen(path, "re");
  char read[LINE_BYTES];
  *line = 0;
  while (file && fgets(read, sizeof read, file)) {
    read[strcspn(read, "\n")] = 0;
    if (*read)
      memcpy(line, read, sizeof read);
  }
  if (file)
    fclose(file);
}

/* Runs the compiler; whatever it prints goes to `log`. */
static bool run_compiler(const provider *p, const char *python, const char *model, const char *path, const char *log) {
  const char *target = p->settings.target ? p->settings.target : "native";
  char *arguments[] = {(char *)python, "-m", "coda_edge.onnxruntime.compile", (char *)model, (char *)path, "--target",
                       (char *)target, NULL};
  posix_spawn_file_actions_t actions;
  pid_t child;
  int ended = 0;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  const int failed = posix_spawnp(&child, python, &actions, NULL, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed) {
    tell(p, ORT_LOG_WARNING, "no bundle is compiled: '%s' does not start: %s", python, strerror(failed));
    return false;
  }
  pid_t waited;
  while ((waited = waitpid(child, &ended, 0)) < 0 && errno == EINTR)
    ;
  /* Where children are reaped by themselves (ECHILD), the bundle itself tells. */
  if ((waited < 0 && errno == ECHILD) || (waited == child && WIFEXITED(ended) && WEXITSTATUS(ended) == 0))
    return true;
  char line[LINE_BYTES];
  last_line(log, line);
  tell(p, ORT_LOG_WARNING, "no bundle is compiled: %s -m coda_edge.onnxruntime.compile %s failed: %s", python, model,
       line);
  return false;
}

/* Opens a bundle, or those that the list beside it names; false if there are none, or one cannot be used. */
static bool open_compiled(provider *p, const char *path) {
  char name[LINE_BYTES], *list = text_new("%s.parts", path);
  const char *slash = strrchr(path, '/');
  FILE *file = list && access(path, R_OK) != 0 ? fopen(list, "re") : NULL;
  bundle *opened;
  OrtStatus *status = NULL;
  bool any = false;
  if (!file && list)
    status = bundle_open(p, path, &opened);
  any = !file && list && !status;
  while (file && !status && fgets(name, sizeof name, file)) {
    name[strcspn(name, "\n")] = 0;
    char *part = text_new("%.*s%s", slash ? (int)(slash - path) + 1 : 0, path, name);
    status = part ? bundle_open(p, part, &opened) : status_new(p->api.ort, ORT_FAIL, "no memory for a path");
    any = !status;
    free(part);
  }
  if (file)
    fclose(file);
  free(list);
  if (!status)
    return any;
  tell(p, ORT_LOG_INFO, "not in the cache: %s", p->api.ort->GetErrorMessage(status));
  p->api.ort->ReleaseStatus(status);
  bundles_free(p->bundles);
  p->bundles = NULL;
  return false;
}

static void compile(provider *p, const char *model, const char *path) {
  char *python = p->settings.python ? strdup(p->settings.python) : running_python();
  char *log = text_new("%s.log", path);
  if (!python) {
    tell(p, ORT_LOG_WARNING,
         "nothing is computed here: no bundle was named, and there is no Python to compile one. Name it in the option "
         "'bundle', or a Python that has coda_edge in the option 'python'");
  } else if (log) {
    tell(p, ORT_LOG_WARNING, "compiling '%s' into '%s'; this is done once and may take minutes", model, path);
    if (run_compiler(p, python, model, path, log) && !open_compiled(p, path))
      tell(p, ORT_LOG_WARNING, "the compiled bundle '%s' cannot be used", path);
  }
  free(python);
  free(log);
}

void just_in_time(provider *p, const char *path) {
  char digest[HEX_BYTES];
  if (!file_digest(path, digest)) {
    tell(p, ORT_LOG_WARNING, "nothing is computed here: the model's file '%s' cannot be read", path);
    return;
  }
  char *folder = cache_folder(p);
  char *cached = folder ? text_new("%s/%s-%s-%s.coda", folder, digest,
                                   p->settings.target ? p->settings.target : "native", CODA_VERSION_TEXT)
                        : NULL;
  /* One for another CPU, or a damaged one, is compiled anew. */
  if (cached && !open_compiled(p, cached))
    compile(p, path, cached);
  free(folder);
  free(cached);
}
