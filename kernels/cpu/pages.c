/* Pages behind the memory of weights: large ones, got before they are written to, given back when nobody wants them. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE ((ptrdiff_t)2 << 20)
#define PAUSE_NS 500000
/* How far beyond what is taken the touching starts, so that it is done before those pages are got by the other thread, too. */
#define GAP ((ptrdiff_t)16 << 20)

/* Ask for 2 MiB pages behind [start, start + bytes), start being a multiple of that; a wish, not a demand. */
void twofold_advise_large_pages(void *start, size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

/* Get the pages of [start, start + bytes), in order, up to `ahead` bytes beyond *taken, which others raise; pages below it are
   theirs. Returns when all are there, when *taken is negative, or where the system cannot do it. */
void twofold_touch_ahead(char *start, ptrdiff_t bytes, ptrdiff_t ahead, const ptrdiff_t *taken) {
#ifdef MADV_POPULATE_WRITE
    for (ptrdiff_t done = 0; done < bytes;) {
        ptrdiff_t wanted = __atomic_load_n(taken, __ATOMIC_RELAXED);
        if (wanted < 0) return;
        if (done < wanted || !done) done = (wanted + GAP + PAGE - 1) / PAGE * PAGE;
        if (done >= wanted + ahead) {
            nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
            continue;
        }
        if (done < bytes && madvise(start + done, (size_t)(bytes - done < PAGE ? bytes - done : PAGE), MADV_POPULATE_WRITE)) return;
        done += PAGE;
    }
#else
    (void)start, (void)bytes, (void)ahead, (void)taken;
#endif
}

/* Get the pages of [start, start + bytes) by one thread. A team that packs would clear most of them twice: two threads that write
   to one new page both clear one, and one is thrown away. */
void twofold_get_pages(char *start, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
    uintptr_t first = (uintptr_t)start & ~(uintptr_t)4095;
    madvise((void *)first, (uintptr_t)start + bytes - first, MADV_POPULATE_WRITE);
#else
    (void)start, (void)bytes;
#endif
}

/* Nobody will read [start, start + bytes), start being a page's, before writing to it. */
void twofold_give_back(void *start, size_t bytes) {
#ifdef MADV_DONTNEED
    madvise(start, bytes, MADV_DONTNEED);
#else
    (void)start, (void)bytes;
#endif
}
