//! The records of TLS 1.3 (RFC 8446, section 5) on a connection whose handshake is over. rustls makes each record in
//! memory of its own and copies it from there, both ways. This code encrypts a record where it is sent from, and
//! decrypts it where it has come. The keys and their updates are rustls's (`rustls::kernel`, made for the kernel's
//! TLS).

use aws_lc_rs::aead::{self, AES_128_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, UnboundKey};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::crypto::cipher::{Iv, Nonce, make_tls13_aad};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::{ConnectionTrafficSecrets, Error, ExtractedSecrets};

/// Bytes of plaintext in a record, at most. A record adds a header, its type and a tag.
pub(super) const RECORD: usize = 16 << 10;
const OVERHEAD: usize = HEADER + 1 + TAG;
const HEADER: usize = 5;
const TAG: usize = 16;
/// Bytes behind a header, at most (section 5.2).
const MOST: usize = RECORD + 256;
/// Records of one key. AES-GCM leaves an attacker no more than one in 2^57 chances with 2^24.5 of them (section 5.5).
const RECORDS_OF_A_KEY: u64 = 1 << 23;

// The types of records.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;

/// The alert that there will be nothing more: its level, which has no meaning any more, and its description.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
// The message that the next record has the next key (section 4.6.3), and whether the other side is to do that, too.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];
const NOT_REQUESTED: u8 = 0;
const REQUESTED: u8 = 1;

/// Bytes of a record that announces the next key.
const UPDATE: usize = OVERHEAD + KEY_UPDATE.len() + 1;
/// The least room that a record is sealed into: a new key may come before it, and the end behind it.
const LEAST_ROOM: usize = UPDATE + OVERHEAD + RECORD + OVERHEAD + CLOSE_NOTIFY.len();

/// The thing that comes next in the bytes that have come.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum OpenedRecord {
    /// The next record is not whole yet.
    Nothing,
    /// A record took so many bytes.
    Taken(usize),
    /// The other side will say no more.
    Ended,
    /// The receiver of the data takes no more.
    Refused,
}

pub(super) struct Records {
    keys: Keys,
    sealing: Half,
    opening: Half,
    /// Whether the other side has asked for another key of ours.
    owes_update: bool,
    records_of_a_key: u64,
}

enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

/// A record that has come.
#[derive(PartialEq, Eq, Debug)]
struct Record<'come> {
    /// Bytes of the whole record.
    whole: usize,
    kind: u8,
    data: &'come [u8],
}

/// One direction of a connection.
struct Half {
    key: LessSafeKey,
    iv: Iv,
    /// The number of the next record.
    number: u64,
}

impl Records {
    /// The records of a client whose handshake is over, all of it sent.
    pub(super) fn of_client(tls: UnbufferedClientConnection) -> Result<Self, String> {
        let (secrets, keys) = tls.dangerous_into_kernel_connection().map_err(|error| error.to_string())?;
        Self::new(secrets, Keys::Client(keys))
    }

    /// The records of a server whose handshake is over, all of it sent.
    pub(super) fn of_server(tls: UnbufferedServerConnection) -> Result<Self, String> {
        let (secrets, keys) = tls.dangerous_into_kernel_connection().map_err(|error| error.to_string())?;
        Self::new(secrets, Keys::Server(keys))
    }

    fn new(secrets: ExtractedSecrets, keys: Keys) -> Result<Self, String> {
        let ExtractedSecrets { tx, rx } = secrets;
        let (sealing, opening) = (Half::new(tx)?, Half::new(rx)?);
        Ok(Self { keys, sealing, opening, owes_update: false, records_of_a_key: RECORDS_OF_A_KEY })
    }

    /// Encrypts as many of these bytes as fit into `room`. Returns how many these are, and how many bytes they are
    /// there.
    pub(super) fn seal(&mut self, bytes: &[u8], room: &mut [u8]) -> Result<(usize, usize), String> {
        let (mut taken, mut end) = (0, 0);
        while taken < bytes.len() && room.len() - end >= LEAST_ROOM {
            if self.owes_update || self.sealing.number >= self.records_of_a_key {
                end += self.update_key(&mut room[end..])?;
            }
            let data = &bytes[taken..bytes.len().min(taken + RECORD)];
            end += self.sealing.seal(DATA, data, &mut room[end..])?;
            taken += data.len();
        }
        Ok((taken, end))
    }

    /// Says that there will be nothing more, for which [`seal`](Self::seal) has left room.
    pub(super) fn close(&mut self, room: &mut [u8]) -> Result<usize, String> {
        self.sealing.seal(ALERT, &CLOSE_NOTIFY, room)
    }

    fn update_key(&mut self, room: &mut [u8]) -> Result<usize, String> {
        let mut message = [0; UPDATE - OVERHEAD];
        message[..KEY_UPDATE.len()].copy_from_slice(&KEY_UPDATE);
        message[KEY_UPDATE.len()] = NOT_REQUESTED;
        let bytes = self.sealing.seal(HANDSHAKE, &message, room)?;
        self.sealing = Half::new(self.keys.next_to_send().map_err(|error| error.to_string())?)?;
        self.owes_update = false;
        Ok(bytes)
    }

    /// Decrypts the record at the beginning of what has come, where it is.
    pub(super) fn open(
        &mut self,
        come: &mut [u8],
        take: &mut impl FnMut(&[u8]) -> bool,
    ) -> Result<OpenedRecord, String> {
        let Some(record) = self.opening.open(come)? else { return Ok(OpenedRecord::Nothing) };
        match (record.kind, record.data) {
            (DATA, data) if take(data) => {}
            (DATA, _) => return Ok(OpenedRecord::Refused),
            (ALERT, [_, 0]) => return Ok(OpenedRecord::Ended),
            (ALERT, [_, what]) => return Err(format!("the other side has ended it with alert {what}")),
            (HANDSHAKE, [message @ .., asks @ (NOT_REQUESTED | REQUESTED)]) if message == KEY_UPDATE => {
                self.owes_update |= *asks == REQUESTED;
                self.opening = Half::new(self.keys.next_to_come().map_err(|error| error.to_string())?)?;
            }
            (kind, _) => return Err(format!("a record of TLS that was not asked for, of kind {kind}")),
        }
        Ok(OpenedRecord::Taken(record.whole))
    }
}

impl Keys {
    fn next_to_send(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(keys) => keys.update_tx_secret(),
            Self::Server(keys) => keys.update_tx_secret(),
        }
    }

    fn next_to_come(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(keys) => keys.update_rx_secret(),
            Self::Server(keys) => keys.update_rx_secret(),
        }
    }
}

impl Half {
    fn new((number, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, String> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err("a cipher that was not offered".to_owned()),
        };
        let key =
            UnboundKey::new(algorithm, key.as_ref()).map_err(|_| "a key of another length".to_owned())?;
        Ok(Self { key: LessSafeKey::new(key), iv, number })
    }

    /// The nonce of the next record. It never comes twice, as no number does.
    fn nonce(&mut self) -> aead::Nonce {
        let Nonce(nonce) = Nonce::new(&self.iv, self.number);
        self.number += 1;
        aead::Nonce::assume_unique_for_key(nonce)
    }

    /// Writes a record of `data` at the beginning of `room`, which must be long enough. Returns the record's length.
    fn seal(&mut self, kind: u8, data: &[u8], room: &mut [u8]) -> Result<usize, String> {
        let behind = data.len() + 1 + TAG;
        let header = make_tls13_aad(behind);
        let (head, rest) = room[..HEADER + behind].split_at_mut(HEADER);
        let (plain, tag) = rest.split_at_mut(data.len() + 1);
        head.copy_from_slice(&header);
        plain[..data.len()].copy_from_slice(data);
        plain[data.len()] = kind;
        let nonce = self.nonce();
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), plain);
        tag.copy_from_slice(sealed.map_err(|_| "a record could not be encrypted".to_owned())?.as_ref());
        Ok(HEADER + behind)
    }

    /// The record at the beginning of what has come. `None` while it is not whole.
    fn open<'come>(&mut self, come: &'come mut [u8]) -> Result<Option<Record<'come>>, String> {
        let Some((header, behind)) = come.split_first_chunk_mut::<HEADER>() else { return Ok(None) };
        let bytes = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if *header != make_tls13_aad(bytes) || bytes > MOST {
            return Err("bytes that are no record of TLS".to_owned());
        }
        let Some(record) = behind.get_mut(..bytes) else { return Ok(None) };
        let nonce = self.nonce();
        let plain = self.key.open_in_place(nonce, Aad::from(*header), record);
        let plain = plain.map_err(|_| "a record that was changed on its way".to_owned())?;
        if plain.len() > RECORD + 1 {
            return Err("a record that is too long".to_owned());
        }
        // Zeros may follow the type.
        let end = plain.iter().rposition(|byte| *byte != 0).ok_or("a record of nothing")?;
        Ok(Some(Record { whole: HEADER + bytes, kind: plain[end], data: &plain[..end] }))
    }
}

#[cfg(test)]
impl Records {
    /// Makes keys change more often.
    pub(super) fn change_keys_after(&mut self, records: u64) {
        self.records_of_a_key = records;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::crypto::cipher::AeadKey;

    use super::*;

    /// The same direction, at one of its ends.
    fn half() -> Half {
        let secrets =
            ConnectionTrafficSecrets::Chacha20Poly1305 { key: AeadKey::from([7; 32]), iv: Iv::from([9; 12]) };
        Half::new((0, secrets)).expect("a key")
    }

    fn sealed(from: &mut Half, data: &[u8]) -> Vec<u8> {
        let mut record = vec![0; data.len() + OVERHEAD];
        assert_eq!(from.seal(DATA, data, &mut record), Ok(record.len()));
        record
    }

    fn data() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![4 => 0..200_usize, 1 => RECORD - 1..=RECORD].prop_map(|bytes| vec![5; bytes])
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn records_come_as_they_were_sent(all in proptest::collection::vec(data(), 1..5), cut: usize) {
            let (mut from, mut to) = (half(), half());
            for data in all {
                let mut record = sealed(&mut from, &data);
                let whole = record.len();
                prop_assert_eq!(to.open(&mut record[..cut % whole]), Ok(None));
                record.extend(b"what comes behind it");
                prop_assert_eq!(to.open(&mut record), Ok(Some(Record { whole, kind: DATA, data: &data })));
            }
        }

        #[test]
        fn a_changed_record_is_refused(data in data(), at: usize, bit in 0..8_u32) {
            let (mut from, mut to) = (half(), half());
            let mut record = sealed(&mut from, &data);
            let at = at % record.len();
            record[at] ^= 1 << bit;
            // A record of another length may have to be waited for.
            prop_assert!(matches!(to.open(&mut record), Ok(None) | Err(_)));
            record.resize(HEADER + MOST, 0);
            prop_assert!(to.open(&mut record).is_err());
        }

        #[test]
        fn a_record_is_refused_out_of_its_turn(data in data(), before in 0..3_u64, after in 0..3_u64) {
            let (mut from, mut to) = (half(), half());
            (from.number, to.number) = (before, after);
            let opened = to.open(&mut sealed(&mut from, &data)).is_ok();
            prop_assert_eq!(opened, before == after);
        }

        #[test]
        fn any_bytes_are_waited_for_or_refused(mut come in proptest::collection::vec(any::<u8>(), 0..99)) {
            prop_assert!(matches!(half().open(&mut come), Ok(None) | Err(_)));
        }
    }

    #[test]
    fn zeros_behind_what_a_record_is_are_no_part_of_it() {
        let (mut from, mut to) = (half(), half());
        // The byte that is written last says the type, and so the record ends in a zero for that.
        let data = [1, 0, 2, DATA, 0, 0];
        let mut record = vec![0; data.len() + OVERHEAD];
        let whole = from.seal(0, &data, &mut record).unwrap();
        assert_eq!(to.open(&mut record), Ok(Some(Record { whole, kind: DATA, data: &[1, 0, 2] })));
        let whole = from.seal(0, &[0; 6], &mut record).unwrap();
        assert!(to.open(&mut record[..whole]).is_err());
    }
}
