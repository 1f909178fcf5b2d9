/* The first process of an emulated machine (tests/emulated_machine.py): runs one program, and switches the machine off.
 *
 * /arguments has the program's arguments, the program's path first, each with a zero byte behind it. Prints "exit status N".
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_ARGUMENTS = 16 };

static void run(void) {
    static char text[1 << 16];
    char *arguments[MOST_ARGUMENTS + 1] = {0};
    int fd = open("/arguments", O_RDONLY);
    long left = read(fd, text, sizeof text - 1);
    close(fd);
    char *next = text;
    for (int i = 0; i < MOST_ARGUMENTS && next < text + left; i++, next += strlen(next) + 1) arguments[i] = next;
    execv(arguments[0], arguments);
    perror(arguments[0]);
    _exit(127);
}

int main(void) {
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("tmp", "/tmp", "tmpfs", 0, NULL);
    mkdir("/dev/shm", 0777);
    mount("shm", "/dev/shm", "tmpfs", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    for (int fd = 0; fd < 3; fd++) dup2(console, fd);
    int status = -1, program = fork();
    if (!program) run();
    waitpid(program, &status, 0);
    printf("exit status %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
    return 1;
}
