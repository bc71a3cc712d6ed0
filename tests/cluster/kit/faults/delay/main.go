// Command delay forwards frames between two interfaces, each frame after a fixed time: a link with latency, for kernels
// without netem.
//
//	delay ekv1 ekd1 50ms
package main

import (
	"log"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

type frame struct {
	due  time.Time
	data []byte
}

// Longest frame with its offload header: segmentation is left to the interfaces.
const longest = 1 << 17

// device opens an interface for whole frames with their offload headers (virtio_net_hdr).
func device(name string) int {
	all := int(unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00)
	link, err := net.InterfaceByName(name)
	check(err)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	check(err)
	check(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	check(unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1))
	check(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	promiscuous := unix.PacketMreq{Ifindex: int32(link.Index), Type: unix.PACKET_MR_PROMISC}
	check(unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &promiscuous))
	check(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: link.Index}))
	return fd
}

func forward(from, to int, delay time.Duration) {
	frames := make(chan frame, 1<<16)
	go func() {
		for next := range frames {
			time.Sleep(time.Until(next.due))
			// A full queue drops frames, as a link does.
			unix.Write(to, next.data)
		}
	}()
	buffer := make([]byte, longest)
	for {
		size, err := unix.Read(from, buffer)
		if err == unix.EINTR || err == unix.ENETDOWN {
			continue
		}
		check(err)
		frames <- frame{time.Now().Add(delay), append([]byte(nil), buffer[:size]...)}
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: delay INTERFACE INTERFACE DURATION")
	}
	delay, err := time.ParseDuration(os.Args[3])
	check(err)
	one, other := device(os.Args[1]), device(os.Args[2])
	go forward(one, other, delay)
	forward(other, one, delay)
}
