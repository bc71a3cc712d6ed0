// Command disk mounts a directory like a disk whose faults its standard input sets, one a line:
//
//	full        no new data: ENOSPC
//	read-only   no change: EROFS
//	slow 200ms  every change and every fsync takes longer
//	sound       no fault
//
// It unmounts the directory when its input ends.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

type fault struct {
	full, readOnly bool
	slow           time.Duration
}

var current atomic.Pointer[fault]

// grows fails where the disk has no space; changes only where it is read-only.
func grows() syscall.Errno {
	if current.Load().full {
		return syscall.ENOSPC
	}
	return changes()
}

func changes() syscall.Errno {
	now := current.Load()
	time.Sleep(now.slow)
	if now.readOnly {
		return syscall.EROFS
	}
	return fs.OK
}

type node struct{ fs.LoopbackNode }

func wrap(root *fs.LoopbackRoot, _ *fs.Inode, _ string, _ *syscall.Stat_t) fs.InodeEmbedder {
	return &node{fs.LoopbackNode{RootData: root}}
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if refused := grows(); refused != fs.OK {
		return nil, refused
	}
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if refused := grows(); refused != fs.OK {
		return nil, nil, 0, refused
	}
	child, handle, more, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	return child, opened(handle), more, errno
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		if refused := changes(); refused != fs.OK {
			return nil, 0, refused
		}
	}
	handle, more, errno := n.LoopbackNode.Open(ctx, flags)
	return opened(handle), more, stale(errno)
}

func (n *node) Getattr(ctx context.Context, handle fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	return stale(n.LoopbackNode.Getattr(ctx, handle, out))
}

// stale makes the kernel look a file up again that was replaced since its last lookup.
func stale(errno syscall.Errno) syscall.Errno {
	if errno == syscall.ENOENT {
		return syscall.ESTALE
	}
	return errno
}

func (n *node) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if refused := grows(); refused != fs.OK {
		return nil, refused
	}
	return n.LoopbackNode.Symlink(ctx, target, name, out)
}

func (n *node) Link(ctx context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if refused := grows(); refused != fs.OK {
		return nil, refused
	}
	return n.LoopbackNode.Link(ctx, target, name, out)
}

func (n *node) Setattr(ctx context.Context, handle fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if refused := changes(); refused != fs.OK {
		return refused
	}
	return n.LoopbackNode.Setattr(ctx, handle, in, out)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	if refused := changes(); refused != fs.OK {
		return refused
	}
	return n.LoopbackNode.Unlink(ctx, name)
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	if refused := changes(); refused != fs.OK {
		return refused
	}
	return n.LoopbackNode.Rmdir(ctx, name)
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if refused := changes(); refused != fs.OK {
		return refused
	}
	return n.LoopbackNode.Rename(ctx, name, parent, newName, flags)
}

// CopyFileRange is left to the kernel, which reads and writes.
func (n *node) CopyFileRange(context.Context, fs.FileHandle, uint64, *fs.Inode, fs.FileHandle, uint64, uint64, uint64) (uint32, syscall.Errno) {
	return 0, syscall.ENOSYS
}

type file struct{ *fs.LoopbackFile }

func opened(handle fs.FileHandle) fs.FileHandle {
	if plain, ok := handle.(*fs.LoopbackFile); ok {
		return &file{plain}
	}
	return handle
}

func (f *file) PassthroughFd() (int, bool) { return 0, false }

func (f *file) Write(ctx context.Context, data []byte, at int64) (uint32, syscall.Errno) {
	if refused := grows(); refused != fs.OK {
		return 0, refused
	}
	return f.LoopbackFile.Write(ctx, data, at)
}

func (f *file) Allocate(ctx context.Context, at, size uint64, mode uint32) syscall.Errno {
	if refused := grows(); refused != fs.OK {
		return refused
	}
	return f.LoopbackFile.Allocate(ctx, at, size, mode)
}

func (f *file) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	if refused := changes(); refused != fs.OK {
		return refused
	}
	return f.LoopbackFile.Fsync(ctx, flags)
}

func set(line string) error {
	next := &fault{}
	switch word, rest, _ := strings.Cut(line, " "); word {
	case "full":
		next.full = true
	case "read-only":
		next.readOnly = true
	case "slow":
		slow, err := time.ParseDuration(rest)
		if err != nil {
			return err
		}
		next.slow = slow
	case "sound":
	default:
		return fmt.Errorf("unknown fault %q", line)
	}
	current.Store(next)
	return nil
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: disk DIRECTORY MOUNTPOINT")
	}
	current.Store(&fault{})
	root := &fs.LoopbackRoot{Path: os.Args[1], NewNode: wrap}
	top := &node{fs.LoopbackNode{RootData: root}}
	root.RootNode = top
	options := fs.Options{MountOptions: fuse.MountOptions{AllowOther: true, DirectMountStrict: true, FsName: "evenkeel-disk"}}
	server, err := fs.Mount(os.Args[2], top, &options)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("mounted")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if err := set(lines.Text()); err != nil {
			log.Fatal(err)
		}
		// Who set the fault may rely on it.
		fmt.Println(lines.Text())
	}
	current.Store(&fault{})
	if err := server.Unmount(); err != nil {
		// Pods may still have it open.
		syscall.Unmount(os.Args[2], syscall.MNT_DETACH)
	}
}
