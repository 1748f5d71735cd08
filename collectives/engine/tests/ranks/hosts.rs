//! Ranks on several hosts, which are pretended: each has a segment and a network of its own.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tpurun_engine::bootstrap::{Store, StoreBootstrap};
use tpurun_engine::network::Network;
use tpurun_engine::{Communicator, Config, Failure, Membership};
use tpurun_protocol::network::Bulk;

const LIMIT: Duration = Duration::from_secs(60);

/// A store in memory.
#[derive(Clone, Default, Debug)]
pub struct Memory(Arc<(Mutex<HashMap<String, String>>, Condvar)>);

impl Store for Memory {
    fn set(&self, key: &str, value: &str) -> Result<(), Failure> {
        self.0.0.lock().unwrap().insert(key.to_owned(), value.to_owned());
        self.0.1.notify_all();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        let keys = self.0.0.lock().unwrap();
        let is_missing = |keys: &mut HashMap<String, String>| !keys.contains_key(key);
        let (keys, late) = self.0.1.wait_timeout_while(keys, LIMIT, is_missing).unwrap();
        assert!(!late.timed_out(), "nobody sets {key}");
        Ok(keys[key].clone())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, Failure> {
        let mut keys = self.0.0.lock().unwrap();
        let sum = keys.get(key).map_or(0, |value| value.parse::<i64>().unwrap()) + delta;
        keys.insert(key.to_owned(), sum.to_string());
        Ok(sum)
    }
}

/// Runs `body` as each rank; `hosts` has the host of each.
pub fn on_hosts<T: Send>(
    hosts: &[usize],
    config: &Config,
    timeout: Duration,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    on_hosts_over(&vec![(1, Bulk::Tcp); hosts.len()], hosts, config, timeout, body)
}

/// The same; `connections` has how many each rank takes from each other one, and what they are for.
pub fn on_hosts_over<T: Send>(
    connections: &[(usize, Bulk)],
    hosts: &[usize],
    config: &Config,
    timeout: Duration,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    let ranks: Vec<usize> = (0..hosts.len()).collect();
    let created = |created: Result<Communicator, Failure>| body(&created.unwrap());
    some_on_hosts(connections, &Memory::default(), hosts, &ranks, config, timeout, created)
}

/// The same of some of the ranks, whether they have come together or not.
pub fn some_on_hosts<T: Send>(
    connections: &[(usize, Bulk)],
    store: &Memory,
    hosts: &[usize],
    ranks: &[usize],
    config: &Config,
    timeout: Duration,
    body: impl Fn(Result<Communicator, Failure>) -> T + Sync,
) -> Vec<T> {
    let networks = connections.iter().map(|(count, bulk)| Network::of_connections(*count, *bulk));
    let networks: Vec<Network> = networks.collect();
    let (networks, body) = (&networks, &body);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .map(|&rank| {
                scope.spawn(move || {
                    let bootstrap = StoreBootstrap::new(store.clone(), rank as u32, &networks[rank]).unwrap();
                    let bootstrap = bootstrap.on_host(&format!("n{}", hosts[rank]));
                    let members = Membership {
                        name: "test".to_owned(),
                        rank: rank as u32,
                        world_ranks: (0..hosts.len() as u32).collect(),
                        epoch: 0,
                    };
                    body(Communicator::create(members, timeout, config.clone(), &bootstrap, None, 1))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
