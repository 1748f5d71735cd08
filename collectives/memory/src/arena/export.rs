//! The words of a rank about its arena, for the others of its host.

/// Where an arena is found: descriptor `fd` of process `pid`; what is there must be this large and carry this
/// id. Travels as 32 bytes, little endian: pid, fd, bytes, id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Export {
    /// The number of the process, in the pid namespace of both sides.
    pub pid: u32,
    /// The number of the descriptor there.
    pub fd: u32,
    /// The size of the data.
    pub bytes: u64,
    /// Random, so that another process with a number that was used before is not taken for this one.
    pub id: [u8; 16],
}

impl Export {
    /// The size of [`Export::to_bytes`].
    pub const BYTES: usize = 32;

    /// For the others.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.fd.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.id);
        bytes
    }

    /// From another; nothing in it is checked before [`super::PeerArena::open`].
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (numbers, id) = bytes.split_at(16);
        let (places, size) = numbers.split_at(8);
        let (pid, fd) = places.split_at(4);
        Self {
            pid: u32::from_le_bytes(pid.try_into().expect("four bytes")),
            fd: u32::from_le_bytes(fd.try_into().expect("four bytes")),
            bytes: u64::from_le_bytes(size.try_into().expect("eight bytes")),
            id: id.try_into().expect("sixteen bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_survives_its_bytes() {
        let export = Export { pid: 1, fd: 2, bytes: 3, id: *b"0123456789abcdef" };
        assert_eq!(Export::from_bytes(&export.to_bytes()), export);
        assert_eq!(&export.to_bytes()[..17], b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\0\0\0\x000");
    }
}
