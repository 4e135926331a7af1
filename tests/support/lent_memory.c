/* Calls a library's functions for a process of another architecture, under qemu's user emulation. Arguments are the caller's own:
   a page that the library touches first is fetched from the caller's memory to the same address, and what a call has
   changed is written back after it. So structures that point to structures need no description. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096
#define MAX_PAGES (1 << 17) /* of one call: 512 MiB; a power of two */
#define AHEAD 32
#define MAX_INTEGERS 24
#define MAX_FLOATS 8

/* As emulated_library.py packs it. */
struct call {
    char name[64];
    int64_t integers[MAX_INTEGERS];
    float floats[MAX_FLOATS];
};

static int memory; /* the caller's, as a file */
static uintptr_t places[MAX_PAGES], table[2 * MAX_PAGES];
static int num_pages;
static char *originals;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void die(const char *text, uintptr_t address) {
    dprintf(2, "%s 0x%lx\n", text, (unsigned long)address);
    _exit(1);
}

/* Where `page` stands in the table, or would. */
static uintptr_t *entry(uintptr_t page) {
    size_t at = page / PAGE * 0x9E3779B97F4A7C15u >> 40 & (2 * MAX_PAGES - 1);
    while (table[at] && table[at] != page) at = (at + 1) & (2 * MAX_PAGES - 1);
    return &table[at];
}

/* Pages appear at their place with their contents: another thread may be reading there already. Who has read the page before
   this one will want those behind it. */
static void fetch(uintptr_t page) {
    int count = 1;
    if (*entry(page - PAGE))
        while (count < AHEAD && !*entry(page + (uintptr_t)count * PAGE)) count++;
    if (num_pages + count > MAX_PAGES) die("no room for the page at", page);
    char *original = originals + (size_t)num_pages * PAGE;
    ssize_t got = pread(memory, original, (size_t)count * PAGE, (off_t)page);
    if (got < PAGE) die("the library touches memory that nobody has, at", page);
    size_t bytes = (size_t)got / PAGE * PAGE;
    void *staged = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (staged == MAP_FAILED) die("no memory for the page at", page);
    memcpy(staged, original, bytes);
    if (mremap(staged, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, page) == MAP_FAILED) die("cannot place the page at", page);
    for (; bytes; bytes -= PAGE, page += PAGE) places[num_pages++] = *entry(page) = page;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    uintptr_t page = (uintptr_t)info->si_addr / PAGE * PAGE;
    while (atomic_flag_test_and_set(&busy)) syscall(SYS_sched_yield);
    if (!*entry(page)) fetch(page);
    atomic_flag_clear(&busy);
}

/* Only bytes that differ: the caller's other threads may be at work on their neighbours. */
static void give_back(uintptr_t page, const char *original) {
    const char *now = (const char *)page;
    for (int i = 0; i < PAGE; i++) {
        int start = i;
        while (i < PAGE && now[i] != original[i]) i++;
        if (i > start && pwrite(memory, now + start, (size_t)(i - start), (off_t)page + start) != i - start)
            die("cannot write to", page);
    }
}

static void give_all_back(void) {
    for (int i = 0; i < num_pages; i++) {
        const char *original = originals + (size_t)i * PAGE;
        if (memcmp((void *)places[i], original, PAGE)) give_back(places[i], original);
        munmap((void *)places[i], PAGE);
    }
    memset(table, 0, num_pages ? sizeof table : 0);
    num_pages = 0;
}

/* The team's workers block every signal, and must not block this one. Stands before libc's. */
int pthread_sigmask(int how, const sigset_t *set, sigset_t *before) {
    sigset_t open;
    if (set) {
        open = *set;
        sigdelset(&open, SIGSEGV);
    }
    return sigprocmask(how, set ? &open : NULL, before);
}

/* Integers and floats have registers of their own and the rest of the integers follows on the stack, so one type of function
   stands for all. */
typedef int any_function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         float, float, float, float, float, float, float, float);

static int make(any_function *function, const struct call *call) {
    const int64_t *i = call->integers;
    const float *f = call->floats;
    return function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16],
                    i[17], i[18], i[19], i[20], i[21], i[22], i[23], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
}

/* Arguments: the library, and the number of the open file that is the caller's memory. Calls come in at 0, results go out at 1. */
int main(int count, char **arguments) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    struct call call;
    if (count != 3) return 2;
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    memory = atoi(arguments[2]);
    originals = mmap(NULL, (size_t)MAX_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (originals == MAP_FAILED || sigaction(SIGSEGV, &action, NULL)) return 1;
    if (write(1, &(int64_t){0}, 8) != 8) return 1; /* ready */
    while (fread(&call, sizeof call, 1, stdin)) {
        any_function *function = (any_function *)dlsym(library, call.name);
        if (!function) {
            fprintf(stderr, "no function %s\n", call.name);
            return 1;
        }
        int64_t result = make(function, &call);
        give_all_back();
        if (write(1, &result, sizeof result) != sizeof result) return 1;
    }
    return 0;
}
