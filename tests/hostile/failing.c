/* Preloaded library that fails one call, or all calls from one on, of a kind, on paths below $FAILING_ROOT.

   arm() chooses the kind, the number and the error, and count() returns the number of calls of a kind since then.
   Kinds: open, write, fsync, rename, unlink, mkdir, and read, which is opening a file outside of stages only to read it;
   other calls of open are of the kind open. Unarmed, it changes nothing. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *const kinds[] = {"open", "write", "fsync", "rename", "unlink", "mkdir", "read"};
#define KINDS (sizeof kinds / sizeof *kinds)

static long numbers[KINDS], first;
static int armed, failing = -1, code, lasting;

static int index_of(const char *kind) {
    for (size_t i = 0; i < KINDS; i++)
        if (!strcmp(kinds[i], kind)) return i;
    return -1;
}

void arm(const char *kind, long number, int error, int forever) {
    failing = index_of(kind);
    first = number;
    code = error;
    lasting = forever;
    memset(numbers, 0, sizeof numbers);
    armed = 1;
}

void disarm(void) { armed = 0; }

long count(const char *kind) { return numbers[index_of(kind)]; }

static int below_root(const char *path) {
    const char *root = getenv("FAILING_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int file_matches(int descriptor) {
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 0) return 0;
    path[length] = 0;
    return below_root(path);
}

static int path_matches(int folder, const char *path) {
    if (path[0] == '/') return below_root(path);
    char here[PATH_MAX];
    if (folder != AT_FDCWD) return file_matches(folder);
    return getcwd(here, sizeof here) && below_root(here);
}

static int fails(const char *kind) {
    int i = index_of(kind);
    long number = __atomic_add_fetch(&numbers[i], 1, __ATOMIC_SEQ_CST);
    return i == failing && (lasting ? number >= first : number == first);
}

static int file_fails(const char *kind, int descriptor) {
    int saved = errno, failed = armed && file_matches(descriptor) && fails(kind);
    errno = failed ? code : saved;
    return failed;
}

static int path_fails(const char *kind, int folder, const char *path) {
    int saved = errno, failed = armed && path_matches(folder, path) && fails(kind);
    errno = failed ? code : saved;
    return failed;
}

static int open_fails(int folder, const char *path, int flags) {
    int reads = (flags & O_ACCMODE) == O_RDONLY && !(flags & (O_CREAT | O_DIRECTORY)) && !strstr(path, ".zoo-");
    return path_fails(reads ? "read" : "open", folder, path);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE; \
        REAL(int, #name, const char *, int, ...); \
        return open_fails(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); \
    }

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        MODE; \
        REAL(int, #name, int, const char *, int, ...); \
        return open_fails(folder, path, flags) ? -1 : real(folder, path, flags, mode); \
    }

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, #name, const char *, const char *); \
        return open_fails(AT_FDCWD, path, mode[0] == 'r' ? O_RDONLY : O_WRONLY) ? NULL : real(path, mode); \
    }

OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)

#define FILE_CALL(type, kind, name, descriptor, declaration, types, arguments) \
    type name declaration { \
        REAL(type, #name, types); \
        return file_fails(kind, descriptor) ? -1 : real arguments; \
    }
#define TYPES(...) __VA_ARGS__

FILE_CALL(ssize_t, "write", write, file, (int file, const void *data, size_t size),
          TYPES(int, const void *, size_t), (file, data, size))
FILE_CALL(ssize_t, "write", pwrite, file, (int file, const void *data, size_t size, off_t place),
          TYPES(int, const void *, size_t, off_t), (file, data, size, place))
FILE_CALL(ssize_t, "write", pwrite64, file, (int file, const void *data, size_t size, off64_t place),
          TYPES(int, const void *, size_t, off64_t), (file, data, size, place))
FILE_CALL(ssize_t, "write", writev, file, (int file, const struct iovec *data, int parts),
          TYPES(int, const struct iovec *, int), (file, data, parts))
FILE_CALL(ssize_t, "write", sendfile, out, (int out, int in, off_t *place, size_t size),
          TYPES(int, int, off_t *, size_t), (out, in, place, size))
FILE_CALL(ssize_t, "write", sendfile64, out, (int out, int in, off64_t *place, size_t size),
          TYPES(int, int, off64_t *, size_t), (out, in, place, size))
FILE_CALL(ssize_t, "write", copy_file_range, out,
          (int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags),
          TYPES(int, off64_t *, int, off64_t *, size_t, unsigned), (in, from, out, to, size, flags))
FILE_CALL(int, "write", ftruncate, file, (int file, off_t size), TYPES(int, off_t), (file, size))
FILE_CALL(int, "write", ftruncate64, file, (int file, off64_t size), TYPES(int, off64_t), (file, size))
FILE_CALL(int, "fsync", fsync, file, (int file), TYPES(int), (file))
FILE_CALL(int, "fsync", fdatasync, file, (int file), TYPES(int), (file))

#define PATH_CALL(kind, name, folder, path, declaration, types, arguments) \
    int name declaration { \
        REAL(int, #name, types); \
        return path_fails(kind, folder, path) ? -1 : real arguments; \
    }

PATH_CALL("rename", rename, AT_FDCWD, to, (const char *from, const char *to),
          TYPES(const char *, const char *), (from, to))
PATH_CALL("rename", renameat, folder, to, (int source, const char *from, int folder, const char *to),
          TYPES(int, const char *, int, const char *), (source, from, folder, to))
PATH_CALL("rename", renameat2, folder, to, (int source, const char *from, int folder, const char *to, unsigned flags),
          TYPES(int, const char *, int, const char *, unsigned), (source, from, folder, to, flags))
PATH_CALL("unlink", unlink, AT_FDCWD, path, (const char *path), TYPES(const char *), (path))
PATH_CALL("unlink", unlinkat, folder, path, (int folder, const char *path, int flags),
          TYPES(int, const char *, int), (folder, path, flags))
PATH_CALL("unlink", rmdir, AT_FDCWD, path, (const char *path), TYPES(const char *), (path))
PATH_CALL("mkdir", mkdir, AT_FDCWD, path, (const char *path, mode_t mode), TYPES(const char *, mode_t), (path, mode))
PATH_CALL("mkdir", mkdirat, folder, path, (int folder, const char *path, mode_t mode),
          TYPES(int, const char *, mode_t), (folder, path, mode))
