/* Pages behind the memory of weights. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Ask for 2 MiB pages behind [start, start + bytes), start being a multiple of that; a wish, not a demand. */
void twofold_advise_large_pages(void *start, size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

/* Spread the pages behind [start, start + bytes), page by page, over the memory nodes whose bits are set; a wish as well. */
void twofold_spread_pages(void *start, size_t bytes, const unsigned long *nodes, size_t words) {
#if defined(__linux__) && defined(SYS_mbind)
    enum { INTERLEAVE = 3 }; /* MPOL_INTERLEAVE; the kernel looks at one bit less than it is told */
    syscall(SYS_mbind, start, bytes, INTERLEAVE, nodes, words * sizeof *nodes * 8 + 1, 0);
#else
    (void)start, (void)bytes, (void)nodes, (void)words;
#endif
}
